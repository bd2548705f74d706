"""Samples in place of damaged ones: the same for every way of reading, and told once."""

from __future__ import annotations

import copy
import errno
import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.data import substitutes
from hpc_train.data.manifest import HASHED_BYTES, Manifest
from hpc_train.data.shards import TokenDataset
from hpc_train.data.substitutes import Substituted
from hpc_train.data.write import write_shard
from hpc_train.errors import ConfigError, DataError, HpcTrainError
from tests.damages import flip_bit

SEQUENCE = 700  # 47 samples to a block; some samples lie in two blocks
VOCAB = 60_000
BLOCKS = 4  # of each shard


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder of three shards of four blocks, and the samples in them."""
    folder = tmp_path_factory.mktemp("stored")
    tokens = [
        np.random.default_rng(n).integers(0, VOCAB, BLOCKS * HASHED_BYTES // 2, np.uint16)
        for n in range(3)
    ]
    shards = [write_shard(folder / f"train-{n}.h5", some) for n, some in enumerate(tokens)]
    manifest = Manifest(
        vocab=VOCAB, dtype="uint16", tokenizer="bytes", documents=3, splits={"train": (*shards,)}
    )
    starts = [range(0, len(some) - SEQUENCE, SEQUENCE) for some in tokens]
    rows = [t[at : at + SEQUENCE] for t, some in zip(tokens, starts, strict=True) for at in some]
    return folder, manifest, np.stack(rows).astype(np.int64)


@pytest.fixture
def copied(stored, tmp_path):
    """A copy of it, to be damaged."""
    folder, manifest, rows = stored
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path, manifest, rows


def spoil(folder, manifest, shard, block):
    """Change a byte of a block of tokens."""
    place = manifest.splits["train"][shard].offset + block * HASHED_BYTES + 99
    flip_bit(folder / f"train-{shard}.h5", place)


def opened(folder, manifest):
    return TokenDataset(folder, manifest, "train", SEQUENCE, damaged="substitute")


def touched(shard, block, per_shard):
    """The samples of a shard that lie in a block, also in part."""
    begins = np.arange(per_shard) * SEQUENCE * 2
    ends = begins + SEQUENCE * 2 + 2
    lie = (begins < (block + 1) * HASHED_BYTES) & (ends > block * HASHED_BYTES)
    return {int(n) + shard * per_shard for n in np.flatnonzero(lie)}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_stands_in_depends_on_the_sample_and_the_damage_alone(copied, data):
    folder, manifest, rows = copied
    blocks = st.tuples(st.integers(0, 2), st.integers(0, BLOCKS - 1))
    spoilt = data.draw(st.sets(blocks, max_size=4))
    for one in spoilt:
        spoil(folder, manifest, *one)
    try:
        whole = opened(folder, manifest).fetch(range(len(rows)))
        pairs = dict(getattr(whole, "pairs", ()))
        damaged = {n for one in spoilt for n in touched(*one, len(rows) // 3)}
        assert {*pairs} == damaged
        assert not damaged & {*pairs.values()}
        dataset = opened(folder, manifest)
        for _ in range(6):
            numbers = st.integers(0, len(rows) - 1)
            wanted = data.draw(st.lists(numbers, min_size=1, max_size=30))
            tokens, targets = batch = dataset.fetch(wanted)
            expected = rows[[pairs.get(number, number) for number in wanted]]
            assert (tokens.numpy() == expected).all()
            assert (targets.numpy()[:, :-1] == expected[:, 1:]).all()
            assert getattr(batch, "pairs", ()) == tuple(
                (number, pairs[number]) for number in wanted if number in pairs
            )
    finally:
        for one in spoilt:
            spoil(folder, manifest, *one)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def foreign(path):
    path.write_bytes((path.parent / "train-0.h5").read_bytes())


def spoil_header(path):
    """Where the file says of what type its tokens are, among others."""
    content = path.read_bytes()
    sizes = (2).to_bytes(4, "little") + bytes(2) + (16).to_bytes(2, "little")
    assert sizes in content
    path.write_bytes(content.replace(sizes, bytes(8)))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (os.unlink, "is missing"),
        (make_pipe, "is not a file"),
        (foreign, "is not the one its manifest describes"),
        (spoil_header, "is not the one its manifest describes"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes, its manifest says"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes, its manifest says"),
    ],
)
def test_a_shard_that_cannot_be_used(copied, caplog, harm, told):
    folder, manifest, rows = copied
    harm(folder / "train-1.h5")
    dataset, third = opened(folder, manifest), len(rows) // 3
    for _ in range(2):
        batch = dataset.fetch(range(len(rows)))
        assert [number for number, _ in batch.pairs] == [*range(third, 2 * third)]
        assert (batch[0].numpy()[:third] == rows[:third]).all()
        assert len({other for _, other in batch.pairs}) > third / 2, "not the same ones again"
        assert len(batch.causes) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith(f"shard {folder}/train-1.h5 ")
    assert told in lines[0]


def test_a_damaged_block_is_told_once_though_threads_meet_it(copied, caplog):
    folder, manifest, rows = copied
    spoil(folder, manifest, 2, 1)
    spoil(folder, manifest, 0, 3)
    dataset = opened(folder, manifest)
    readers = [dataset, copy.deepcopy(dataset), copy.deepcopy(dataset)]
    threads = [threading.Thread(target=one.fetch, args=[range(len(rows))]) for one in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = sorted(record.getMessage() for record in caplog.records)
    assert [line.partition(" is damaged")[0] for line in lines] == [
        f"shard {folder}/train-{number}.h5" for number in (0, 2)
    ]
    assert "block 3 of its dataset tokens" in lines[0]
    assert "block 1 of its dataset tokens" in lines[1]


def test_where_nothing_sound_is_left(copied):
    folder, manifest, _ = copied
    for number in range(3):
        (folder / f"train-{number}.h5").unlink()
    with pytest.raises(DataError, match=r"train-0.h5 is missing, and 64 samples .* copy the"):
        opened(folder, manifest).fetch([3])


def test_a_token_beyond_the_vocabulary_is_damage(copied):
    folder, manifest, rows = copied
    small = Manifest(
        vocab=int(rows.max()),
        dtype="uint16",
        tokenizer="bytes",
        documents=3,
        splits=manifest.splits,
    )
    (number,) = np.flatnonzero((rows == rows.max()).any(1))[:1].tolist()
    with pytest.raises(DataError, match=r"block \d of its dataset tokens has the token"):
        TokenDataset(folder, small, "train", SEQUENCE).fetch([number])
    assert isinstance(opened(folder, small).fetch([number]), Substituted)


def test_a_lack_of_the_system_is_no_damage(copied, monkeypatch):
    folder, manifest, _ = copied
    dataset = opened(folder, manifest)

    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(HpcTrainError, match="Too many open files") as caught:
        dataset.fetch([1])
    assert not isinstance(caught.value, DataError)


def test_a_shard_that_could_not_be_read_for_a_moment_is_read_again(copied, monkeypatch):
    folder, manifest, rows = copied
    dataset, real, calls = opened(folder, manifest), os.open, []

    def at_first(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*arguments)

    monkeypatch.setattr(os, "open", at_first)
    batch = dataset.fetch([1, 5])
    assert not isinstance(batch, Substituted)
    assert (batch[0].numpy() == rows[[1, 5]]).all()


def test_a_shard_that_could_not_be_read_for_longer_is_read_in_the_next_epoch(copied):
    folder, manifest, rows = copied
    dataset, third = opened(folder, manifest), len(rows) // 3
    (folder / "train-1.h5").rename(folder / "away")
    batch = dataset.fetch([third, 5])
    assert [number for number, _ in batch.pairs] == [third]
    (folder / "away").rename(folder / "train-1.h5")
    again = dataset.fetch([third, 5])
    assert not isinstance(again, Substituted)
    assert (again[0].numpy() == rows[[third, 5]]).all()


def test_another_policy_is_refused(copied):
    folder, manifest, _ = copied
    with pytest.raises(ConfigError, match="damaged is 'skip': give raise or substitute"):
        TokenDataset(folder, manifest, "train", SEQUENCE, damaged="skip")


def test_the_share_of_shards_that_cannot_be_used_is_limited(copied, monkeypatch):
    folder, manifest, _ = copied
    (folder / "train-2.h5").unlink()
    unfit = substitutes.unfit_shards(folder, manifest, manifest.splits["train"])
    assert [*unfit] == ["train-2.h5"]
    with pytest.raises(DataError, match=r"in 1 shard .*train-2.h5 is missing.* 10% at most"):
        substitutes.check_unfit_share(folder, manifest, unfit)
    monkeypatch.setattr(substitutes, "MOST_SUBSTITUTED", 0.34)
    substitutes.check_unfit_share(folder, manifest, unfit)
