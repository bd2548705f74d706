"""Samples of a token data set: the right ones, verified by block, whatever was read before."""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.data import TokenDataset
from hpc_train.data.manifest import FILE_NAME, HASHED_BYTES, Manifest
from hpc_train.data.write import write_shard
from hpc_train.errors import DataError
from tests.damages import flip_bit

VOCAB = 60_000
SIZES = (5 * HASHED_BYTES // 2 + 11, 300, HASHED_BYTES // 2 - 1)  # tokens of two bytes each


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder of shards of several blocks, and the tokens in them."""
    folder = tmp_path_factory.mktemp("stored")
    generator = np.random.default_rng(0)
    tokens = [generator.integers(0, VOCAB, size, np.uint16) for size in SIZES]
    shards = [write_shard(folder / f"train-{n}.h5", some) for n, some in enumerate(tokens)]
    manifest = Manifest(
        vocab=VOCAB, dtype="uint16", tokenizer="bytes", documents=3, splits={"train": (*shards,)}
    )
    return folder, manifest, tokens


@pytest.fixture
def copied(stored, tmp_path):
    """A copy of it, to be damaged."""
    folder, manifest, _ = stored
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path, manifest


def rows_of(tokens, sequence):
    """The samples that the shards hold, with the token behind each."""
    rows = [
        some[start : start + sequence + 1]
        for some in tokens
        for start in range(0, len(some) - sequence, sequence)
    ]
    return np.stack(rows).astype(np.int64)


@settings(max_examples=40)
@given(data=st.data(), sequence=st.sampled_from([7, 128, 999, HASHED_BYTES, 2 * HASHED_BYTES + 3]))
def test_any_samples_in_any_order(stored, data, sequence):
    folder, manifest, tokens = stored
    expected = rows_of(tokens, sequence)
    dataset = TokenDataset(folder, manifest, "train", sequence)
    assert len(dataset) == len(expected)
    for _ in range(3):
        numbers = st.integers(0, len(expected) - 1)
        runs = st.tuples(numbers, numbers).map(lambda ends: [*range(*ends)][:50])
        some = data.draw(st.lists(runs | numbers.map(lambda number: [number]), max_size=20))
        wanted = [index for run in some for index in run]
        inputs, targets = dataset.fetch(wanted)
        assert (inputs.numpy() == expected[wanted][:, :-1]).all()
        assert (targets.numpy() == expected[wanted][:, 1:]).all()
    dataset.close()


def test_a_folder_is_opened_by_its_path(copied, stored):
    folder, manifest = copied
    with pytest.raises(DataError, match="holds no prepared data"):
        TokenDataset.open(folder, sequence=100)
    (folder / FILE_NAME).write_text(manifest.to_json())
    tokens, targets = TokenDataset.open(str(folder), sequence=100).fetch([7])
    expected = rows_of(stored[2], 100)[7]
    assert tokens[0].tolist() == expected[:-1].tolist()
    assert targets[0].tolist() == expected[1:].tolist()


def test_what_was_given_stays_as_it_is(stored):
    """Memory of batches is used again, but not while a tensor or array of a batch is left."""
    folder, manifest, tokens = stored
    dataset, expected = TokenDataset(folder, manifest, "train", 100), rows_of(tokens, 100)
    few = [[*range(8)], [5, 900, 3, 70, 8, 2, 1, 6], [7, 8, 9, 300, 301, 20, 21, 40]]
    wanted = [[one + shift for one in some] for shift in range(20) for some in few]
    batches = [dataset.fetch(some) for some in wanted]
    kept = [(batch[n % 2][3:], n % 2) for n, batch in enumerate(batches)]
    arrays = [targets.numpy() for _, targets in batches[::5]]
    del batches
    for some in wanted:
        dataset.fetch(some)
    for (part, shift), some in zip(kept, wanted, strict=True):
        assert (part.numpy() == expected[some][3:, shift : shift + 100]).all()
    for array, some in zip(arrays, wanted[::5], strict=True):
        assert (array == expected[some][:, 1:]).all()
    memory = dataset.fetch(few[0])[0].data_ptr()
    assert dataset.fetch(few[0])[0].data_ptr() == memory


@pytest.mark.parametrize("wanted", [[3, 4, 5], [3, 4, 900], [9, 3, 700]])
def test_targets_that_a_program_changes_leave_the_inputs_as_they_are(stored, wanted):
    folder, manifest, tokens = stored
    inputs, targets = TokenDataset(folder, manifest, "train", 100).fetch(wanted)
    targets.zero_()
    assert (inputs.numpy() == rows_of(tokens, 100)[wanted][:, :-1]).all()


def test_several_threads_fetch_at_once(stored):
    folder, manifest, tokens = stored
    dataset, expected = TokenDataset(folder, manifest, "train", 100), rows_of(tokens, 100)
    few = [np.random.default_rng(n).permutation(len(expected))[:8] for n in range(100)]
    few += [np.arange(n, n + 8) for n in range(100)]

    def same(some):
        inputs, targets = dataset.fetch(some)
        return (inputs.numpy() == expected[some][:, :-1]).all() and (
            targets.numpy() == expected[some][:, 1:]
        ).all()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(same, few * 3))


def test_threads_read_the_same_where_storage_is_slow(stored, monkeypatch):
    folder, manifest, tokens = stored
    monkeypatch.setattr("hpc_train.data.read_threads.SLOW_SECONDS", -1.0)
    dataset = TokenDataset(folder, manifest, "train", 100)
    seen, real = set(), os.preadv

    def noted(*arguments):
        seen.add(threading.get_ident())
        time.sleep(1e-4)  # as long as this thread waits, another one has its turn
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", noted)
    before = threading.active_count()
    wanted = np.random.default_rng(1).permutation(len(dataset))
    assert (dataset.fetch(wanted)[0].numpy() == rows_of(tokens, 100)[wanted][:, :-1]).all()
    assert len(seen) > 1
    assert threading.active_count() == before


def test_an_error_in_a_thread_is_the_callers(copied, monkeypatch):
    folder, manifest = copied
    monkeypatch.setattr("hpc_train.data.read_threads.SLOW_SECONDS", -1.0)
    shard = manifest.splits["train"][0]
    flip_bit(folder / shard.name, shard.offset + HASHED_BYTES + 5)
    dataset = TokenDataset(folder, manifest, "train", 100)
    with pytest.raises(DataError, match="block 1"):
        dataset.fetch(range(len(dataset)))


def test_a_copy_in_a_worker_reads_the_same(stored):
    folder, manifest, _ = stored
    dataset = TokenDataset(folder, manifest, "train", 100)
    first = dataset.fetch([3, 1])[0]
    assert (pickle.loads(pickle.dumps(dataset)).fetch([3, 1])[0] == first).all()


def test_a_flipped_bit_is_named_by_file_dataset_and_block(copied):
    folder, manifest = copied
    shard = manifest.splits["train"][0]
    flip_bit(folder / shard.name, shard.offset + HASHED_BYTES + 5)
    dataset = TokenDataset(folder, manifest, "train", 100)
    dataset.fetch([0, 1])  # of a sound block
    with pytest.raises(DataError, match=r"train-0.h5 is damaged: block 1 of its dataset tokens"):
        dataset.fetch([HASHED_BYTES // 200 + 3])
    with pytest.raises(DataError, match="block 1"):  # as often as it is asked for
        dataset.fetch([0, HASHED_BYTES // 200 + 3])


def test_damage_between_a_long_samples_ends_is_found(copied):
    folder, manifest = copied
    shard = manifest.splits["train"][0]
    flip_bit(folder / shard.name, shard.offset + 2 * HASHED_BYTES + 9)
    dataset = TokenDataset(folder, manifest, "train", 2 * HASHED_BYTES + 3)
    with pytest.raises(DataError, match="block 2"):
        dataset.fetch([0])


def test_the_table_of_hashes_is_verified(copied):
    folder, manifest = copied
    shard = manifest.splits["train"][1]
    flip_bit(folder / shard.name, shard.hashes_offset)
    dataset = TokenDataset(folder, manifest, "train", 100)
    with pytest.raises(DataError, match=r"train-1.h5 is damaged: its dataset hashes"):
        dataset.fetch(range(len(dataset)))


def test_a_shard_that_changes_under_a_run_is_verified_again(copied, monkeypatch):
    monkeypatch.setattr("hpc_train.data.shard_files.CHECKED_SECONDS", 0.0)
    folder, manifest = copied
    shard = manifest.splits["train"][0]
    dataset = TokenDataset(folder, manifest, "train", 100)
    whole = dataset.fetch(range(len(dataset)))[0]
    os.utime(folder / shard.name)  # another time, and the same bytes
    assert (dataset.fetch(range(len(dataset)))[0] == whole).all()
    flip_bit(folder / shard.name, shard.offset + 3)
    os.utime(folder / shard.name, (1, 1))
    with pytest.raises(DataError, match="block 0"):
        dataset.fetch([0])


def test_a_shard_that_is_replaced_while_it_is_closed_is_verified_again(copied, monkeypatch):
    folder, manifest = copied
    monkeypatch.setattr("hpc_train.data.shard_files.most_open_files", lambda: 1)
    dataset = TokenDataset(folder, manifest, "train", 100)
    last = len(dataset) - 1
    dataset.fetch([0])
    dataset.fetch([last])  # closes the first shard
    content = bytearray((folder / "train-0.h5").read_bytes())
    content[manifest.splits["train"][0].offset] ^= 1
    (folder / "train-0.h5").unlink()
    (folder / "train-0.h5").write_bytes(content)
    with pytest.raises(DataError, match="block 0"):
        dataset.fetch([0])
    (folder / "train-0.h5").write_bytes(b"")
    dataset.fetch([last])
    with pytest.raises(DataError, match=r"train-0.h5"):
        dataset.fetch([0])


def test_a_copy_in_memory_that_is_wrong_is_read_again(stored, monkeypatch):
    folder, manifest, tokens = stored
    real, bad = os.preadv, [True]

    def once(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        if len(buffers[0]) == HASHED_BYTES and bad:
            bad.clear()
            buffers[0][7] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", once)
    dataset = TokenDataset(folder, manifest, "train", 100)
    assert (dataset.fetch([0])[0].numpy() == rows_of(tokens, 100)[:1, :-1]).all()
    assert not bad
