"""A read that fails on one rank is repeated; if that is in vain, all ranks end with one error."""

from __future__ import annotations

import pytest

from hpc_train import files
from hpc_train.checkpoint import fileformat, reading
from hpc_train.errors import CheckpointUnreadable
from hpc_train.mpi.group import Group
from tests.checkpoint.faults import Call, fail, fail_late, faults
from tests.checkpoint.states import found, save, store

pytestmark = pytest.mark.mpi

SAVED = (1, 2)


@pytest.fixture
def folder(job, together, monkeypatch):
    """With two checkpoints, in which each rank has several extents to read."""
    monkeypatch.setattr(fileformat, "EXTENT_BYTES", 256)
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.0))
    made = store(together / "run", job.world)
    for step in SAVED:
        save(made, step)
    return together / "run"


def reads(folder, world: Group) -> list[tuple[int, int, str]]:
    """Rank, number and name of all the calls that the ranks make to resume. Collective."""
    with faults() as seen:
        assert found(folder, world) == SAVED[-1]
    names = world.comm.allgather(seen.names) if world.comm else [seen.names]
    return [(rank, n, name) for rank, calls in enumerate(names) for n, name in enumerate(calls)]


@pytest.mark.parametrize("fault", [fail, fail_late])
def test_a_read_that_fails_once_on_one_rank_loses_no_step(job, folder, fault):
    world, tried = job.world, reads(folder, job.world)
    assert {rank for rank, _, name in tried if name == "read"} == {*range(world.size)}
    for rank, number, name in tried:
        with faults(fault, number if world.rank == rank else -1):
            step = found(folder, world)
        steps = world.comm.allgather(step) if world.comm else [step]
        assert {*steps} == {SAVED[-1]}, (rank, number, name, steps)


@pytest.mark.parametrize("rank", range(4))
def test_a_disk_that_one_rank_cannot_read_is_the_same_error_on_all(job, folder, monkeypatch, rank):
    world = job.world
    if rank >= world.size:
        pytest.skip(f"needs {rank + 1} ranks")

    def unreadable(name: str, function: Call, *arguments):
        return fail(name, function) if name == "read" else function(*arguments)

    with monkeypatch.context() as patch:
        if world.rank == rank:
            patch.setattr(files, "call", unreadable)
        told = ""
        try:
            store(folder, world).resume()
        except CheckpointUnreadable as error:
            told = str(error)
    everywhere = world.comm.allgather(told) if world.comm else [told]
    assert len({*everywhere}) == 1, everywhere
    assert f"step-{SAVED[-1]:09d}" in told  # the older one is no substitute
    assert "Input/output error" in told
    assert world.comm is None or f"rank {rank} " in told
