from __future__ import annotations

import pickle

import h5py
import numpy as np
import pytest
import torch

from hpc_train.data.block_cache import BlockCache
from hpc_train.data.manifest import HASHED_BYTES
from hpc_train.data.order import SampleOrder
from hpc_train.data.tables.dataset import TableDataset
from hpc_train.data.tables.table_request import TableOptions
from hpc_train.errors import DataError
from tests.damages import flip_bit
from tests.data.prepared import made_table, prepared, write_csv

ROWS = 3000


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    path = write_csv(folder / "a.csv", made_table(ROWS))
    options = TableOptions(shard_mb=0.05)
    return folder / "out", prepared(path, folder / "out", options=options)


def stored(table, split="train"):
    out, manifest = table
    parts = []
    for shard in manifest.splits[split]:
        with h5py.File(out / shard.name) as file:
            parts.append(file["rows"][:])
    return np.concatenate(parts)


def same(batch, rows):
    numeric, categorical, target, weight = batch
    np.testing.assert_array_equal(numeric.numpy(), rows["numeric"])
    np.testing.assert_array_equal(categorical.numpy(), rows["categorical"])
    np.testing.assert_array_equal(target.numpy(), rows["target"][:, 0])
    np.testing.assert_array_equal(weight.numpy(), rows["weight"][:, 0])


def test_any_rows_in_any_order_are_those_of_the_shards(table):
    dataset, rows = TableDataset(*table, "train"), stored(table)
    assert len(table[1].splits["train"]) > 2
    assert len(dataset) == len(rows) == table[1].rows("train")
    random = np.random.default_rng(0)
    size = len(rows)
    for wanted in (
        np.arange(size),
        np.arange(size)[::-1],
        random.integers(0, size, 500),
        random.permutation(size)[:7],
        np.sort(random.permutation(size)[: size // 2]),
        np.array([5, 5, 4]),
        np.array([size - 1]),
        np.array([], np.int64),
    ):
        same(dataset.fetch(wanted), rows[wanted])
    same(pickle.loads(pickle.dumps(dataset)).fetch([3, 1]), rows[[3, 1]])
    dataset.close()
    same(dataset.fetch([2]), rows[[2]])
    for wrong in (-1, size):
        with pytest.raises(IndexError, match=f"from 0 to {size - 1}"):
            dataset.fetch([0, wrong])


def test_rows_of_a_cache_are_those_of_the_shards(table, tmp_path):
    rows = stored(table)
    for _ in range(2):
        cache = BlockCache(tmp_path / "cache", table[1].digest)
        dataset = TableDataset(*table, "train", cache=cache)
        same(dataset.fetch(np.arange(len(rows))), rows)
        same(dataset.fetch([7, 3]), rows[[7, 3]])
        dataset.close()


def test_batches_have_the_types_that_models_read(table):
    for dtype in (torch.float32, torch.float64):
        numeric, categorical, target, weight = TableDataset(
            *table, "validation", dtype=dtype
        ).fetch([0, 1])
        assert (numeric.dtype, weight.dtype) == (dtype, dtype)
        assert (categorical.dtype, target.dtype) == (torch.int64, torch.int64)
        of = table[1].features
        assert numeric.shape == (2, len(of.numeric))
        assert categorical.shape == (2, len(of.categorical))


def test_blocks_of_rows_are_shuffled(table):
    dataset = TableDataset(*table, "train")
    dataset.samples_per_block = 64
    order = SampleOrder.of(dataset, 100)
    seen = np.concatenate([order.indices(step, 0, 100) for step in range(1, 11)])
    assert order.by_blocks
    assert len({*seen.tolist()}) == 1000
    same(dataset.fetch(seen), stored(table)[seen])


def test_a_damaged_row_is_named_by_file_and_block(tmp_path):
    path = write_csv(tmp_path / "a.csv", made_table(ROWS))
    manifest = prepared(path, tmp_path / "out", options=TableOptions(validation=0))
    [shard] = manifest.splits["train"]
    flip_bit(tmp_path / "out" / shard.name, shard.offset + HASHED_BYTES + 11)
    dataset = TableDataset(tmp_path / "out", manifest, "train")
    dataset.fetch([0])
    row = HASHED_BYTES // dataset.nbytes + 1
    with pytest.raises(DataError, match=f"{shard.name} is damaged: block 1 of its dataset rows"):
        dataset.fetch([0, row])
    with pytest.raises(DataError, match="split validation of .* has no rows"):
        TableDataset(tmp_path / "out", manifest, "validation")
