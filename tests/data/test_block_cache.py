"""Blocks in a cache: the same samples, whatever happens to the cache, and nothing left behind."""

from __future__ import annotations

import copy
import fcntl
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hpc_train.data import block_cache
from hpc_train.data.block_cache import BlockCache
from hpc_train.data.manifest import HASHED_BYTES, Manifest, read_manifest
from hpc_train.data.shard_files import ShardFiles
from hpc_train.data.shards import TokenDataset
from hpc_train.data.write import write_shard
from hpc_train.errors import ConfigError, DataError
from tests.damages import flip_bit
from tests.waiting import wait_until

T = 100
SIZES = (9 * HASHED_BYTES // 2 + 11, 300, 3 * HASHED_BYTES)  # tokens of two bytes each


def write_data(folder, seed=0):
    """Shards of several blocks. Returns their manifest."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 60_000, size, np.uint16) for size in SIZES]
    shards = [write_shard(folder / f"train-{n}.h5", some) for n, some in enumerate(tokens)]
    manifest = Manifest(
        vocab=60_000, dtype="uint16", tokenizer="bytes", documents=3, splits={"train": (*shards,)}
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return manifest


@pytest.fixture
def stored(tmp_path):
    """A data folder, its manifest, and all its samples."""
    manifest = write_data(tmp_path / "data")
    dataset = TokenDataset(tmp_path / "data", manifest, "train", T)
    samples = dataset.fetch(range(len(dataset)))[0]
    dataset.close()
    return tmp_path / "data", manifest, samples


@pytest.fixture
def cached(stored, tmp_path):
    """A function that opens the data with the cache; all are closed at the end."""
    opened = []

    def make(limit=0, sequence=T):
        cache = BlockCache(tmp_path / "cache", stored[1].digest, limit)
        opened.append((cache, TokenDataset(stored[0], stored[1], "train", sequence, cache)))
        return opened[-1]

    yield make
    for cache, dataset in opened:
        dataset.close()
        cache.close()


def reads_of(dataset, monkeypatch, folder):
    """Bytes that a data set reads from the shards themselves while it fetches all samples."""
    real, counted = os.preadv, []

    def noted(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        # What lies before the data is at 0, and is checked whenever a shard is opened.
        if offset and Path(f"/proc/self/fd/{descriptor}").resolve().is_relative_to(folder):
            counted.append(count)
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", noted)
        samples = dataset.fetch(range(len(dataset)))[0]
    return sum(counted), samples


def copies(cache):
    return {path: path.read_bytes() for path in cache.path.iterdir()}


def test_a_second_process_reads_no_block_from_the_shards(stored, cached, monkeypatch):
    folder, _, samples = stored
    one, two = cached()[1], cached()[1]
    first, found = reads_of(one, monkeypatch, folder)
    assert (found == samples).all()
    assert first > sum(SIZES) * 2
    again, found = reads_of(two, monkeypatch, folder)
    assert (found == samples).all()
    assert again < 1000  # tables of hashes


@pytest.mark.parametrize("sequence", [7, HASHED_BYTES // 2 + 5, 2 * HASHED_BYTES + 3])
def test_samples_over_blocks_of_which_only_some_are_cached(stored, cached, sequence):
    folder, manifest, _ = stored
    plain = TokenDataset(folder, manifest, "train", sequence)
    cache, dataset = cached(sequence=sequence)
    order = np.random.default_rng(3).permutation(len(plain)).tolist()
    dataset.fetch(order[:2])
    for path in cache.path.iterdir():  # every second block is wrong, and cannot be put right
        for begin in range(2048, path.stat().st_size, 2 * HASHED_BYTES):
            flip_bit(path, begin + 100)
    other_cache, other = cached(limit=1, sequence=sequence)
    for few in np.array_split(order, 5):
        assert (other.fetch(few)[0] == plain.fetch(few)[0]).all()
    assert other_cache is not cache
    plain.close()


def test_a_damaged_block_is_read_from_the_shard_and_put_right(stored, cached):
    _, manifest, samples = stored
    (cache, one), (_, two) = cached(), cached()
    one.fetch(range(len(one)))
    whole = copies(cache)
    shard = manifest.splits["train"][0]
    flip_bit(cache.path / shard.name, shard.offset + HASHED_BYTES + 5)
    assert (two.fetch(range(len(two)))[0] == samples).all()
    assert copies(cache) == whole


def test_damage_in_the_shard_does_not_matter_where_a_sound_block_is_cached(stored, cached):
    folder, manifest, samples = stored
    (cache, one), (_, two), (_, three) = cached(), cached(), cached()
    one.fetch(range(len(one)))
    shard = manifest.splits["train"][0]
    flip_bit(folder / shard.name, shard.offset + 5)
    assert (two.fetch(range(len(two)))[0] == samples).all()
    # The copy that `two` has verified is gone. The shard's block was never verified by it.
    os.truncate(cache.path / shard.name, 0)
    for dataset in (two, three):
        with pytest.raises(DataError, match="block 0 of its dataset tokens"):
            dataset.fetch([0, 1])


@pytest.mark.parametrize("slow", [False, True])
def test_a_copy_that_is_truncated_under_a_running_job(stored, cached, slow, caplog, monkeypatch):
    if slow:
        monkeypatch.setattr("hpc_train.data.read_threads.SLOW_SECONDS", -1.0)
    (cache, one), (_, two) = cached(), cached()
    for dataset in (one, two):
        dataset.fetch(range(len(dataset)))
    for path in cache.path.iterdir():
        os.truncate(path, 5000)
    (_, three) = cached()
    for dataset in (one, three, two, one):  # the third one makes new copies
        assert (dataset.fetch(range(len(dataset)))[0] == stored[2]).all()
    assert caplog.text.count("goes on without it") == 2  # once for each that had it open


def test_a_cache_that_is_removed_under_a_running_job(stored, cached, monkeypatch):
    monkeypatch.setattr("hpc_train.data.shard_files.most_open_files", lambda: 2)
    cache, one = cached()
    one.fetch([0])
    shutil.rmtree(cache.path)
    for _ in range(2):
        assert (one.fetch(range(len(one)))[0] == stored[2]).all()
    (_, two) = cached()
    assert (two.fetch(range(len(two)))[0] == stored[2]).all()


def test_a_copy_that_was_replaced_while_it_was_closed_is_verified_again(
    stored, cached, monkeypatch
):
    monkeypatch.setattr("hpc_train.data.shard_files.most_open_files", lambda: 2)  # one shard
    cache, one = cached()
    one.fetch(range(len(one)))
    for path in cache.path.iterdir():
        path.unlink()
    cached()[1].fetch([0])  # makes a copy again, with one block
    assert (one.fetch(range(len(one)))[0] == stored[2]).all()


def test_the_limit_holds_and_the_rest_comes_from_the_shards(stored, cached, caplog):
    caplog.set_level("INFO")
    limit = 12 * HASHED_BYTES
    cache, one = cached(limit)
    for dataset in (one, cached(limit)[1]):
        assert (dataset.fetch(range(len(dataset)))[0] == stored[2]).all()
    used = sum(path.stat().st_blocks << 9 for path in cache.path.iterdir())
    assert HASHED_BYTES < used <= limit
    assert caplog.text.count("has no more room") == 2  # once for each process


def test_a_full_disk_is_no_error(stored, cached, tmp_path, monkeypatch):
    if os.geteuid():
        pytest.skip("only root can mount a small file system")
    (tmp_path / "cache").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(tmp_path / "cache")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        monkeypatch.setattr(BlockCache, "_room", lambda _: 1 << 40)  # as if it had just filled up
        cache, one = cached()
        assert block_cache._in_memory(cache._folder)
        for _ in range(2):
            assert (one.fetch(range(len(one)))[0] == stored[2]).all()
        assert (cached()[1].fetch(range(len(one)))[0] == stored[2]).all()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "cache")], check=True)


def test_a_tenth_of_the_disk_is_left_free_and_half_of_the_memory(cached, monkeypatch):
    cache, dataset = cached()
    dataset.fetch(range(len(dataset)))
    used = sum(path.stat().st_blocks << 9 for path in cache.path.iterdir())
    disk = os.statvfs(cache.path)
    cache._in_memory = False
    expected = (disk.f_bavail - disk.f_blocks // 10) * disk.f_frsize
    assert cache._room() == pytest.approx(max(0, expected), rel=0.05)
    cache._in_memory = True
    monkeypatch.setattr(block_cache, "free_bytes", lambda: used + 7)
    assert cache._room() == 7


def test_the_last_one_that_leaves_removes_it(stored, tmp_path):
    one, two = (BlockCache(tmp_path / "cache", stored[1].digest) for _ in range(2))
    assert one.path == two.path
    assert one.path.stat().st_mode & 0o777 == 0o700
    one.close()
    assert two.path.is_dir()
    in_worker = pickle.loads(pickle.dumps(two))
    assert in_worker.open("train-0.h5", 10) >= 0
    two.close()
    assert not any((tmp_path / "cache").iterdir())
    assert in_worker.open("train-1.h5", 10) == -1
    in_worker.close()


def test_left_over_caches_go_or_are_used_again(stored, tmp_path, cached, monkeypatch):
    folder, _, samples = stored
    older = write_data(tmp_path / "older", seed=1)
    killed = """
import os, signal, sys
from pathlib import Path
from hpc_train.data.block_cache import BlockCache
from hpc_train.data.manifest import read_manifest
from hpc_train.data.shards import TokenDataset
for name in sys.argv[2:]:
    manifest = read_manifest(Path(name))
    cache = BlockCache(Path(sys.argv[1]), manifest.digest)
    dataset = TokenDataset(Path(name), manifest, "train", 100, cache)
    dataset.fetch(range(len(dataset)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    words = [sys.executable, "-c", killed, str(tmp_path / "cache")]
    done = subprocess.run([*words, str(tmp_path / "older"), str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len([*(tmp_path / "cache").iterdir()]) == 2
    (tmp_path / "cache" / "somebody's file").touch()
    cache, dataset = cached()
    assert not [path for path in (tmp_path / "cache").iterdir() if older.digest in path.name]
    count, found = reads_of(dataset, monkeypatch, folder)
    assert (found == samples).all()
    assert count < 1000
    dataset.close()
    cache.close()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["somebody's file"]


def test_a_cache_in_use_is_no_left_over(stored, tmp_path):
    one = BlockCache(tmp_path / "cache", stored[1].digest)
    two = BlockCache(tmp_path / "cache", "0" * 32)
    assert one.path.is_dir()
    assert two.path.is_dir()
    two.close()
    one.close()


def test_a_process_that_is_killed_while_it_writes(stored, tmp_path, cached):
    """It is killed in the middle of a block, which then has not its hash."""
    folder, _, samples = stored
    killed = """
import os, signal, sys
from pathlib import Path
from hpc_train import files
from hpc_train.data.block_cache import BlockCache
from hpc_train.data.manifest import read_manifest
from hpc_train.data.shards import TokenDataset
real, left = files.write_at, [3]
def write_at(descriptor, data, offset):
    left[0] -= 1
    if not left[0]:
        real(descriptor, data[:10_000], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor, data, offset)
files.write_at = write_at
manifest = read_manifest(Path(sys.argv[2]))
cache = BlockCache(Path(sys.argv[1]), manifest.digest)
dataset = TokenDataset(Path(sys.argv[2]), manifest, "train", 100, cache)
for index in range(0, len(dataset), 10):
    dataset.fetch([index])
"""
    words = [sys.executable, "-c", killed, str(tmp_path / "cache"), str(folder)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    _, dataset = cached()
    assert (dataset.fetch(range(len(dataset)))[0] == samples).all()


def test_a_folder_of_somebody_else_is_refused(stored, tmp_path):
    digest = stored[1].digest
    path = BlockCache(tmp_path / "cache", digest).path
    shutil.rmtree(path)
    (tmp_path / "trap").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "trap")
    with pytest.raises(ConfigError, match="is not a folder of yours alone"):
        BlockCache(tmp_path / "cache", digest)
    path.unlink()
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    with pytest.raises(ConfigError, match="is not a folder of yours alone"):
        BlockCache(tmp_path / "cache", digest)
    if os.geteuid() == 0:
        path.chmod(0o700)
        os.chown(path, 12345, 12345)
        with pytest.raises(ConfigError, match="is not a folder of yours alone"):
            BlockCache(tmp_path / "cache", digest)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'file'}: ")):
        BlockCache(tmp_path / "file", digest)


def test_one_that_comes_while_the_last_one_leaves_makes_it_anew(stored, tmp_path, monkeypatch):
    digest = stored[1].digest
    one, real = BlockCache(tmp_path / "cache", digest), fcntl.flock

    def removed_first(descriptor, operation):
        if operation == fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", real)
            one.close()
        return real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    two = BlockCache(tmp_path / "cache", digest)
    assert two.path.is_dir()
    assert two.open("train-0.h5", 10) >= 0
    two.close()
    assert not two.path.exists()


def test_a_deep_copy_reads_the_same_and_shares_the_cache(stored, cached, monkeypatch):
    _, one = cached()
    one.fetch(range(len(one)))
    other = copy.deepcopy(one)
    count, found = reads_of(other, monkeypatch, stored[0])
    assert (found == stored[2]).all()
    assert count < 1000
    other.close()


def test_a_deep_copy_may_make_a_shards_copy_at_the_same_time(cached, monkeypatch):
    cache, _ = cached()
    other, real = copy.deepcopy(cache), os.link
    opened = []

    def link(*names, **folders):
        monkeypatch.setattr(os, "link", real)
        opened.append(other.open("shard", 64))
        real(*names, **folders)

    monkeypatch.setattr(os, "link", link)
    opened.append(cache.open("shard", 64))
    other.close()
    assert os.path.sameopenfile(*opened)
    assert [path.name for path in cache.path.iterdir()] == ["shard"]
    for descriptor in opened:
        os.close(descriptor)


def test_what_is_asked_for_ahead_is_in_the_cache_when_it_is_read(stored, cached, monkeypatch):
    _, one = cached()
    one.ahead(range(len(one)))
    wait_until(lambda: not one._ahead._wanted.qsize())
    one._ahead.close()
    count, found = reads_of(one, monkeypatch, stored[0])
    assert (found == stored[2]).all()
    assert count < 1000


def test_a_block_that_is_under_way_is_not_read_twice(stored, cached, monkeypatch):
    folder, _, samples = stored
    _, one = cached()
    real, counted = os.preadv, []

    def slow(descriptor, buffers, offset):
        if offset and Path(f"/proc/self/fd/{descriptor}").resolve().is_relative_to(folder):
            counted.append(len(buffers[0]))
            if len(buffers[0]) > 1000:
                time.sleep(0.3)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    one.ahead(range(len(one)))
    wait_until(one.files.asked.any, pause=0.001)
    assert (one.fetch(range(len(one)))[0] == samples).all()
    tables = 1000
    assert sum(counted) < 2 * sum(SIZES) + tables


def test_without_a_cache_nothing_is_asked_for_ahead(stored):
    folder, manifest, _ = stored
    before = threading.active_count()
    dataset = TokenDataset(folder, manifest, "train", T)
    dataset.ahead(range(len(dataset)))
    assert threading.active_count() == before
    dataset.close()


def test_tokens_in_a_file_of_others_are_cached_and_documents_are_not(tmp_path, monkeypatch):
    """The file of others is shorter than the place of the documents in the shard's own file."""
    tokens = np.random.default_rng(0).integers(0, 60_000, 3000, np.uint16)
    tokens.tofile(tmp_path / "raw.bin")
    folder = tmp_path / "data"
    folder.mkdir()
    begins = np.arange(0, 3000, 7)
    shard = write_shard(folder / "train-0.h5", tokens, begins, source=(tmp_path / "raw.bin", 0))
    manifest = Manifest(60_000, "uint16", "bytes", len(begins), {"train": (shard,)})
    with closing(BlockCache(tmp_path / "cache", manifest.digest)) as cache:
        for times in range(2):
            files = ShardFiles(folder, manifest, "train", cache)
            found = np.empty(len(begins), np.int64)
            one = np.zeros(1, np.int64)
            files.read(one, one, found.nbytes, [[found.view(np.uint8).data]], "documents")
            assert (found == begins).all()
            dataset = TokenDataset(folder, manifest, "train", T, cache)
            assert (dataset.fetch([1])[0].numpy() == tokens[T : 2 * T]).all()
            assert [copy.read_bytes() for copy in cache.path.iterdir()] == [tokens.tobytes()]
            assert files.cache is not None, times
            files.close()
            dataset.close()


def test_asking_ahead_never_fails(stored, cached):
    folder, manifest, samples = stored
    _, one = cached()
    sound, name = len(samples) - 1, manifest.splits["train"][0].name
    (folder / name).rename(folder / "away")
    one.ahead([0, sound])
    one.ahead([sound])
    assert (one.fetch([sound])[0] == samples[sound]).all()
    with pytest.raises(DataError, match="train-0"):
        one.fetch([0])
    one.close()


@pytest.mark.mpi
def test_ranks_of_a_node_share_it(job, together):
    world = job.world
    if world.rank == 0:
        write_data(together / "data")
    world.barrier()
    manifest = read_manifest(together / "data")
    plain = TokenDataset(together / "data", manifest, "train", T)
    cache = BlockCache(together / "cache", manifest.digest)
    dataset = TokenDataset(together / "data", manifest, "train", T, cache)
    order = np.random.default_rng(world.rank).permutation(len(plain))
    same = all(
        bool((dataset.fetch(few)[0] == plain.fetch(few)[0]).all())
        for few in np.array_split(order, 60)
    )
    world.barrier()
    there = cache.path.is_dir()
    world.barrier()
    dataset.close()
    cache.close()
    world.barrier()
    gone = not cache.path.exists()
    world.barrier()
    assert same
    assert there
    assert gone
