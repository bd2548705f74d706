"""A save during which something goes wrong leaves the last checkpoint, or the new one complete."""

from __future__ import annotations

import os
import shutil
import signal
from random import Random

import pytest
import torch
from torch import nn

from hpc_train import files
from hpc_train.checkpoint import Checkpoints, fileformat, tools
from hpc_train.checkpoint.store import find
from hpc_train.collectives import connect
from hpc_train.errors import CheckpointError
from hpc_train.mpi.group import Group
from tests.checkpoint.faults import fail, fail_late, faults, kill, write_less, write_nothing
from tests.checkpoint.power import Disk

STATES = 20  # random ones after each call


@pytest.fixture(autouse=True)
def small_extents(monkeypatch):
    """Several extents in a small file."""
    monkeypatch.setattr(fileformat, "EXTENT_BYTES", 1024)
    monkeypatch.setattr(fileformat, "ALIGNMENT", 4096)


def store(directory, group, engine="posix", seed=0, keep=2) -> Checkpoints:
    """Of a small model, the same on all ranks."""
    torch.manual_seed(seed)
    model = nn.Linear(40, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Checkpoints(directory, connect(group), model, optimizer, engine=engine, keep=keep)


def change(made: Checkpoints, step: int) -> None:
    """The state after a step."""
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.fill_(step)


def check(directory, group, known: set[int]) -> int:
    """The step that is found again, one of the known ones, complete; nothing else is left."""
    made = store(directory, group, seed=1)
    step = made.resume()
    assert step in known
    assert all(bool((parameter == step).all()) for parameter in made.model.parameters())
    return step


def counted(directory, group, engine="posix") -> list[str]:
    """The calls of a save on this rank, of the second of three checkpoints that are kept two."""
    made = store(directory, group, engine)
    for step in (1, 2):
        change(made, step)
        made.save(step)
    change(made, 3)
    with faults() as seen:
        made.save(3)
    return seen.names


def test_a_kill_at_any_call_leaves_one_that_is_complete(tmp_path):
    calls = counted(tmp_path / "counted", Group())
    assert {"create", "reserve", "write", "sync", "read", "close", "rename", "unlink"} <= {*calls}
    found = []
    for number in range(len(calls)):
        directory = tmp_path / str(number)
        made = store(directory, Group())
        for step in (1, 2):
            change(made, step)
            made.save(step)
        change(made, 3)
        child = os.fork()
        if not child:
            with faults(kill, number):
                made.save(3)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        found.append(check(directory, Group(), {2, 3}))
        assert not list(directory.glob(".step-*"))  # what the dead process left
        made.save(3)
        assert check(directory, Group(), {3}) == 3
    assert found == sorted(found)
    assert {*found} == {2, 3}


@pytest.mark.parametrize("keep", [1, 2])
def test_a_loss_of_power_at_any_call_leaves_one_that_is_complete(tmp_path, monkeypatch, keep):
    folder = tmp_path / "run"
    made = store(folder, Group(), keep=keep)
    for step in (1, 2):
        change(made, step)
        made.save(step)
    change(made, 3)
    disk = Disk(folder)
    with monkeypatch.context() as patch:
        patch.setattr(files, "call", disk)
        made.save(3)
    random, after = Random(0), tmp_path / "after"
    for number, state in enumerate(disk.states):
        last = number == len(disk.states) - 1
        for share in [0.0, 1.0, *(random.random() for _ in range(STATES))]:
            after.mkdir()
            state.leave(after, random, share)
            check(after, Group(), {3} if last else {2, 3})
            shutil.rmtree(after)


@pytest.mark.mpi
@pytest.mark.parametrize("fault", [fail, fail_late])
@pytest.mark.parametrize("engine", ["posix", "mpiio"])
def test_an_error_on_one_rank_is_the_same_error_on_all(job, together, engine, fault):
    world = job.world
    if engine == "mpiio" and world.size == 1:
        return
    everyone = world.comm.allgather(counted(together / "counted", world, engine))
    made = store(together / "run", world, engine)
    step = 0
    for rank, calls in enumerate(everyone):
        for number, name in enumerate(calls):
            step += 1
            change(made, step)
            told = ""
            with faults(fault, number if world.rank == rank else -1):
                try:
                    made.save(step)
                except CheckpointError as error:
                    told = str(error)
            everywhere = world.comm.allgather(told)
            left = [path.name for path in (together / "run").glob(".step-*")]
            damage = [list(tools.damaged(path)) for path in find(together / "run", "auto")]
            world.barrier()
            assert len({*everywhere}) == 1, (name, everywhere)
            if told:
                assert f"rank {rank} " in told
                assert "older checkpoints are untouched" in told
            assert not left, (name, left)
            assert not any(damage), name
    change(made, step + 1)
    made.save(step + 1)
    assert check(together / "run", world, {step + 1}) == step + 1


@pytest.mark.mpi
@pytest.mark.parametrize("fault", [write_less, write_nothing])
@pytest.mark.parametrize("engine", ["posix", "mpiio"])
def test_short_writes_are_seen_or_made_up_for(job, together, engine, fault):
    world = job.world
    if engine == "mpiio" and world.size == 1:
        return
    everyone = world.comm.allgather(counted(together / "counted", world, engine))
    made = store(together / "run", world, engine)
    change(made, 1)
    made.save(1)
    step, failed = 1, 0
    for rank, calls in enumerate(everyone):
        for number, name in enumerate(calls):
            if not name.endswith("write"):
                continue
            step += 1
            change(made, step)
            with faults(fault, number if world.rank == rank else -1):
                try:
                    made.save(step)
                except CheckpointError:
                    failed += 1
            assert check(together / "run", world, {*range(1, step + 1)})
    assert failed > 0 or fault is write_less
