"""Samples of whole documents: all tokens once, and nothing of another document beside them."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.data.manifest import HASHED_BYTES, Manifest
from hpc_train.data.packing import DocumentWindows, PackedDataset, best_fit
from hpc_train.data.shard_files import ShardFiles
from hpc_train.data.write import write_shard
from hpc_train.errors import DataError
from tests.damages import flip_bit

VOCAB = 50_000


def written(folder, shards):
    """Write shards of documents, which are lists of lengths; a first length of -n goes on one.

    Returns:
        The manifest, and the tokens of all documents, or of their parts in a shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made, documents, count = [], [], 0
    for number, lengths in enumerate(shards):
        edges = np.cumsum([0, *map(abs, lengths)])
        tokens = (np.arange(count, count + edges[-1]) * 7919 % VOCAB).astype(np.uint16)
        count += len(tokens)
        begins = edges[:-1][np.array(lengths) >= 0]
        made.append(write_shard(folder / f"train-{number}.h5", tokens, begins))
        documents += [tokens[a:b].tolist() for a, b in pairwise(edges)]
    splits = {"train": (*made,)}
    manifest = Manifest(
        vocab=VOCAB, dtype="uint16", tokenizer="bytes", documents=len(documents), splits=splits
    )
    return manifest, documents


def opened(folder, manifest, sequence):
    windows = DocumentWindows(ShardFiles(folder, manifest, "train"), sequence)
    return PackedDataset(windows, windows.count(range(len(windows))))


def pieces_of(batch):
    """The pieces of documents in a batch: inputs, and the target of the last one."""
    found = []
    for tokens, targets, positions in zip(*(column.tolist() for column in batch), strict=True):
        begins = [place for place, position in enumerate(positions) if position == 0]
        assert begins[0] == 0
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
            assert positions[begin:end] == [*range(end - begin)]
            if targets[begin] == -100:  # padding, at the end
                assert set(targets[begin:]) == {-100}
                assert set(tokens[begin:]) == {0}
                assert end == len(tokens)
                continue
            assert targets[begin : end - 1] == tokens[begin + 1 : end]
            found.append((*tokens[begin:end], targets[end - 1]))
    return found


def cut(documents, sequence):
    """The pieces that documents are cut into."""
    return [
        tuple(tokens[begin : begin + sequence + 1])
        for tokens in documents
        for begin in range(0, len(tokens) - 1, sequence)
    ]


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
GOING_ON = st.tuples(st.booleans(), LENGTHS).map(
    lambda given: [-given[1][0] if given[0] else given[1][0], *given[1][1:]]
)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr("hpc_train.data.packing.PACKED_TOGETHER", 6)
    monkeypatch.setattr("hpc_train.data.packing.KEPT_WINDOWS", 2)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(shards=st.lists(GOING_ON, min_size=1, max_size=4), sequence=st.integers(1, 40))
def test_every_token_is_in_one_sample_once(small_windows, tmp_path_factory, shards, sequence):
    folder = tmp_path_factory.mktemp("packed")
    manifest, documents = written(folder, shards)
    dataset, expected = opened(folder, manifest, sequence), Counter(cut(documents, sequence))
    assert dataset.targets == sum(len(tokens) - 1 for tokens in documents)
    assert (len(dataset) > 0) == (len(expected) > 0)
    if expected:
        assert Counter(pieces_of(dataset.fetch(range(len(dataset))))) == expected
        some = np.random.default_rng(0).integers(0, len(dataset), 30)
        alone = [dataset.fetch([index]) for index in some]
        for column, single in zip(dataset.fetch(some), zip(*alone, strict=True), strict=True):
            assert (column.numpy() == np.concatenate(single)).all()
    dataset.close()


@given(st.lists(st.integers(1, 30), max_size=200), st.integers(30, 50))
def test_each_item_goes_into_the_fullest_bin_that_has_space(sizes, capacity):
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, space in enumerate(left) if space >= size]
        if fitting:
            left[min(fitting, key=left.__getitem__)] -= size
        else:
            left.append(capacity - size)
    bins, count = best_fit(np.array(sizes, np.int64), capacity)
    filled = np.bincount(bins, sizes, count).astype(int)
    assert sorted(capacity - filled) == sorted(left)


def test_the_ranks_may_count_windows_in_parts(small_windows, tmp_path):
    manifest, _ = written(tmp_path, [[3, 9, 20, 4] * 9, [-5], [8] * 7])
    windows = DocumentWindows(ShardFiles(tmp_path, manifest, "train"), 10)
    assert len(windows) == 6 + 1 + 2
    parts = [windows.count(range(first, min(first + 2, 9))) for first in range(0, 10, 2)]
    assert (np.concatenate(parts) == windows.count(range(9))).all()


def test_a_copy_for_a_worker_reads_the_same(tmp_path):
    manifest, _ = written(tmp_path, [[5, 30, 7, 1, 12], [9, 90]])
    dataset = opened(tmp_path, manifest, 16)
    every = range(len(dataset))
    other = pickle.loads(pickle.dumps(dataset))
    for mine, theirs in zip(dataset.fetch(every), other.fetch(every), strict=True):
        assert mine.equal(theirs)


def test_damaged_documents_and_tokens_are_named(tmp_path):
    manifest, _ = written(tmp_path, [[5] * (HASHED_BYTES // 8 + 9)])
    (shard,) = manifest.splits["train"]
    path = tmp_path / shard.name
    flip_bit(path, shard.documents_offset + HASHED_BYTES + 8)
    with pytest.raises(DataError, match="block 1 of its dataset documents"):
        opened(tmp_path, manifest, 16)
    flip_bit(path, shard.documents_offset + HASHED_BYTES + 8)
    dataset = opened(tmp_path, manifest, 16)
    flip_bit(path, shard.offset + 4)
    with pytest.raises(DataError, match="block 0 of its dataset tokens"):
        dataset.fetch(range(len(dataset)))


def test_documents_in_a_wrong_order_are_refused(tmp_path):
    shard = write_shard(tmp_path / "train-0.h5", np.arange(50, dtype="u2"), np.array([0, 30, 20]))
    manifest = Manifest(50, "uint16", "bytes", 3, {"train": (shard,)})
    with pytest.raises(DataError, match="documents that begin outside of their place"):
        opened(tmp_path, manifest, 16)
