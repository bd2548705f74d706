"""A save during which something goes wrong leaves the last checkpoint, or the new one complete."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
from contextlib import nullcontext
from dataclasses import replace
from random import Random

import pytest

from hpc_train import files
from hpc_train.checkpoint import Checkpoints, inspection
from hpc_train.checkpoint.catalogue import find_checkpoints
from hpc_train.errors import CheckpointError
from hpc_train.mpi.group import Group
from tests.checkpoint.faults import Call, fail, fail_late, faults, kill, write_less, write_nothing
from tests.checkpoint.power import Disk
from tests.checkpoint.states import found, save, store

STATES = 20  # random ones after each call


pytestmark = pytest.mark.usefixtures("small_extents")


def counted(directory, group, engine, *, background=False) -> list[str]:
    """The calls of a save on this rank, of the second of three checkpoints that are kept two."""
    made = store(directory, group, engine)
    for step in (1, 2):
        save(made, step)
    with faults() as seen:
        save(made, 3, background=background)
    return seen.names


def every_call(directory, group, engine, *, background=False) -> list[tuple[int, int, str]]:
    """Rank, number and name of all the calls that the ranks make in a save. Collective."""
    names = group.comm.allgather(counted(directory, group, engine, background=background))
    return [(rank, n, name) for rank, calls in enumerate(names) for n, name in enumerate(calls)]


def test_a_kill_at_any_call_leaves_one_that_is_complete(tmp_path):
    calls = counted(tmp_path / "counted", Group(), "posix")
    assert {"create", "reserve", "write", "sync", "read", "close", "rename", "unlink"} <= {*calls}
    steps = []
    for number in range(len(calls)):
        directory = tmp_path / str(number)
        made = store(directory, Group())
        for step in (1, 2):
            save(made, step)
        child = os.fork()
        if not child:
            with faults(kill, number):
                save(made, 3)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        steps.append(found(directory, Group()))
        assert not list(directory.glob(".step-*"))  # what the dead process left
        save(made, 3)
        assert found(directory, Group()) == 3
    assert steps == sorted(steps)
    assert {*steps} == {2, 3}


@pytest.mark.parametrize("keep", [1, 2])
def test_a_loss_of_power_at_any_call_leaves_one_that_is_complete(tmp_path, monkeypatch, keep):
    folder = tmp_path / "run"
    made = store(folder, Group(), keep=keep)
    for step in (1, 2):
        save(made, step)
    disk = Disk(folder)
    with monkeypatch.context() as patch:
        patch.setattr(files, "call", disk)
        save(made, 3)
    random, after = Random(0), tmp_path / "after"
    for number, state in enumerate(disk.states):
        last = number == len(disk.states) - 1
        for share in [0.0, 1.0, *(random.random() for _ in range(STATES))]:
            after.mkdir()
            state.leave(after, random, share)
            assert found(after, Group()) in ({3} if last else {2, 3})
            shutil.rmtree(after)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("engine", "fault", "background"),
    [
        pytest.param("posix", fail, False, marks=pytest.mark.long),
        ("posix", fail_late, False),
        ("posix", fail, True),
        pytest.param("posix", fail_late, True, marks=pytest.mark.long),
        ("mpiio", fail, False),
        pytest.param("mpiio", fail_late, False, marks=pytest.mark.long),
        ("mpiio_collective", fail_late, False),  # in which nobody stays away from a call
    ],
)
def test_an_error_on_one_rank_is_the_same_error_on_all(job, together, engine, fault, background):
    world = job.world
    made, step, older = store(together / "run", world, engine), 0, False
    calls = every_call(together / "counted", world, engine, background=background)
    for rank, number, name in calls:
        step += 1
        at = number if world.rank == rank else -1
        told = failure_of(made, step, fault, at, background=background)
        everywhere = world.comm.allgather(told)
        left = [path.name for path in (together / "run").glob(".step-*")]
        damage = [
            list(inspection.damaged(path)) for path in find_checkpoints(together / "run", "auto")
        ]
        world.barrier()
        assert len({*everywhere}) == 1, (name, everywhere)
        if told:
            assert f"rank {rank} " in told
            assert ("older checkpoints are untouched" in told) == older
        assert not left, (name, left)
        assert not any(damage), name
        older = bool(damage)
    save(made, step + 1)
    assert found(together / "run", world) == step + 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ("posix", write_less),
        ("posix", write_nothing),
        ("mpiio", write_less),
        ("mpiio", write_nothing),
        ("mpiio_collective", write_less),
    ],
)
def test_short_writes_are_seen_or_made_up_for(job, together, engine, fault):
    world = job.world
    made, step, failed = store(together / "run", world, engine), 1, 0
    save(made, step)
    for rank, number, name in every_call(together / "counted", world, engine):
        if name.endswith("write"):
            step += 1
            failed += bool(failure_of(made, step, fault, number if world.rank == rank else -1))
            assert found(together / "run", world) in range(1, step + 1)
    assert failed > 0 or fault is write_less


def failure_of(
    made: Checkpoints, step: int, fault: Call, at: int, *, background: bool = False
) -> str:
    """What is said of a save in which this rank's call with the number `at` goes wrong."""
    with faults(fault, at):
        try:
            save(made, step, background=background)
        except CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.mpi(min_size=2)
def test_what_mpi_io_wrote_is_read_back_in_any_case(job, together):
    made = store(together / "run", job.world, "mpiio")
    made.policy = replace(made.policy, verify=False)
    with faults(write_nothing, -1) as seen:
        save(made, 1)
    writers = job.world.gathered("mpi_write" in seen.names)
    mine = job.world.rank == writers.index(True)
    at = seen.names.index("mpi_write") if mine else -1
    with pytest.raises(CheckpointError, match="not on the disk"), faults(write_nothing, at):
        save(made, 2)


@pytest.mark.parametrize(("number", "saved"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_syncs_no_folders_fails_no_save(tmp_path, monkeypatch, number, saved):
    real = files.call

    def refusing(name, function, *arguments):
        if name == "sync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
            raise OSError(number, os.strerror(number))
        return real(name, function, *arguments)

    monkeypatch.setattr(files, "call", refusing)
    made = store(tmp_path / "run", Group())
    with nullcontext() if saved else pytest.raises(CheckpointError, match=os.strerror(number)):
        save(made, 1)
        assert found(tmp_path / "run", Group()) == 1
