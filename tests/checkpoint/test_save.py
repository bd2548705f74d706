from __future__ import annotations

import ctypes
import errno
import os

import pytest
import torch

from hpc_train import files
from hpc_train.checkpoint import engines, fileformat, restore
from hpc_train.checkpoint import save as saving
from hpc_train.errors import CheckpointError, UserError
from hpc_train.mpi.group import Group
from tests.checkpoint.states import save_tensors

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def small_extents(monkeypatch):
    monkeypatch.setattr(fileformat, "EXTENT_BYTES", 4096)


def state_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": (100, 70), "b": (3,), "c": (), "d": (2000,)}
    return {name: torch.randn(s, generator=generator).double() for name, s in sizes.items()}


def held(tensors):
    return {name: fileformat.LocalTensor.whole(tensor) for name, tensor in tensors.items()}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("engine", ["mpiio", "mpiio_collective", "posix"])
def test_any_number_of_ranks_and_any_engine_write_the_same_bytes(group, together, engine):
    path = together / f"{group.size}-{engine}"
    save_tensors(path, held(state_of()), b'{"x": 1}', group, engine)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state_of().items()}
    reader = restore.open_together(path, group)
    restore.load_tensors(reader, held(loaded), group)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_of().items())
    assert restore.load_state(reader, group) == {"x": 1}
    if group.rank == 0:
        save_tensors(together / "alone", held(state_of()), b'{"x": 1}', Group())
        assert path.read_bytes() == (together / "alone").read_bytes()


class Broken:
    """A writer whose k-th call fails, on one rank; "silent" writes nothing and says it did."""

    def __init__(self, real, counter, how):
        self.real, self.counter, self.how = real, counter, how

    def __getattr__(self, name):
        def call(*arguments):
            self.counter[0] -= 1
            if self.counter[0] == 0 and name != "close":
                if self.how == "silent":
                    return None
                raise OSError(self.how, os.strerror(self.how))
            return getattr(self.real, name)(*arguments)

        return call


@pytest.mark.parametrize("how", [errno.ENOSPC, errno.EIO, "silent"])
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_failure_on_one_rank_is_raised_on_all_and_older_checkpoints_stay(
    job, together, monkeypatch, how, call, rank
):
    group = job.world
    if group.size < 4:
        pytest.skip("needs 4 ranks")
    path = together / "checkpoint"
    save_tensors(path, held(state_of()), b"{}", group)
    before = path.read_bytes()
    counter = [call if group.rank == rank else -1]
    real = engines.open_writer
    monkeypatch.setattr(
        saving, "open_writer", lambda *arguments: Broken(real(*arguments), counter, how)
    )
    changed = state_of(seed=1)
    silent_sync = False
    try:
        save_tensors(path, held(changed), b"{}", group)
        silent_sync = True
    except CheckpointError as error:
        assert error.agreed
        assert "could not be written" in str(error)
        assert path.read_bytes() == before
    if silent_sync:  # a sync that did nothing cannot be noticed, and the data are there
        assert how == "silent"
        loaded = {name: torch.zeros_like(tensor) for name, tensor in changed.items()}
        restore.load_tensors(restore.open_together(path, group), held(loaded), group)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in changed.items())
    if group.rank == 0:  # which has cleaned up
        assert [entry.name for entry in together.iterdir()] == ["checkpoint"]


def test_a_full_disk_is_noticed_before_anything_is_written(job, together, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "reserve", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*free space or quota"):
        save_tensors(together / "checkpoint", held(state_of()), b"{}", job.world)
    job.world.barrier()
    assert list(together.iterdir()) == []


def test_ranks_with_different_tensors_are_named(job, together):
    if job.world.size == 1:
        pytest.skip("needs 2 ranks")
    tensors = state_of()
    if job.world.rank == 1:
        tensors["d"] = torch.zeros(5)
    with pytest.raises(UserError, match=r"rank 1 .*the plan of the checkpoint differs .* in d:"):
        save_tensors(together / "checkpoint", held(tensors), b"{}", job.world)
    other = b'{"x":1}' if job.world.rank == 1 else b"{}"
    with pytest.raises(UserError, match=r"rank 1 .* differs .* in what is no tensor"):
        save_tensors(together / "checkpoint", held(state_of()), other, job.world)


def test_a_damaged_file_is_an_error_on_all_ranks(job, together):
    path = together / "checkpoint"
    save_tensors(path, held(state_of()), b"{}", job.world)
    if job.world.rank == 0:
        with path.open("r+b") as file:
            file.seek((1 << 20) + 5000)
            file.write(b"????")
    job.world.barrier()
    reader = restore.open_together(path, job.world)
    with pytest.raises(CheckpointError, match="are not what was saved"):
        restore.load_tensors(reader, held(state_of()), job.world)


def test_where_space_cannot_be_claimed_the_file_gets_its_length(job, together, monkeypatch):
    class Library:
        def __init__(self, *_, **__):
            self.errors = [errno.EINTR, errno.EOPNOTSUPP]  # a signal comes first

        def fallocate(self, *_):
            ctypes.set_errno(self.errors.pop(0))
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    path = together / str(job.world.rank)
    with path.open("wb") as file:
        files.reserve(file.fileno(), 0, 12345)
    assert path.stat().st_size == 12345


@pytest.mark.ranks(2, 4)
def test_each_rank_reads_back_what_another_one_wrote(group, together, monkeypatch):
    """The writer's own node may have in its cache what is not on the disk."""
    seen, read_back = [], saving._read_back

    def noted(partial, layout, hashes, other, numbers):
        seen.append(other)
        read_back(partial, layout, hashes, other, numbers)

    monkeypatch.setattr(saving, "_read_back", noted)
    save_tensors(together / "checkpoint", held(state_of()), b"{}", group)
    assert len(seen) == 1
    assert seen[0] != group.rank
    assert sorted(group.gathered(seen[0])) == [*range(group.size)]
