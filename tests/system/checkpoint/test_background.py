"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading

import pytest
import torch

from hpc_train import files
from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.catalogue import SAVE_SECONDS_FILE
from hpc_train.checkpoint.exchange import Exchange
from hpc_train.checkpoint.policy import SavePolicy
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import connect
from hpc_train.errors import CheckpointError
from hpc_train.mpi.group import Group
from tests.checkpoint.states import found as found_again
from tests.checkpoint.states import save, store
from tests.checkpoint.test_store import make, train
from tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("small_extents")


def trained_on(directory, group, *, background: bool) -> Checkpoints:
    """Trained for 6 steps, with checkpoints after 2 and 4; the same batches on all ranks."""
    model, optimizer = make()
    made = Checkpoints(
        directory,
        connect(group),
        TrainingState(model, optimizer),
        SavePolicy(background=background),
    )
    for step in range(1, 7):
        train(model, optimizer, 1, first=step)
        made.poll()
        if step in (2, 4):
            made.save(step, background=background)
    made.finish()
    return made


def content(directory) -> dict[str, bytes]:
    """All files by name, but for what saving has taken."""
    paths = [path for path in directory.iterdir() if path.name != SAVE_SECONDS_FILE]
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.ranks(1, 2, 3, 4)
def test_background_checkpoints_have_the_bytes_of_blocking_ones(group, together):
    folders = {how: together / f"{group.size}-{how}" for how in (True, False)}
    for background, folder in folders.items():
        trained_on(folder, group, background=background)
    group.barrier()
    assert content(folders[True]) == content(folders[False])
    assert len(content(folders[True])) == 3


def test_the_optimizer_waits_until_all_is_copied_and_the_forward_pass_does_not(
    tmp_path, monkeypatch
):
    trained_on(tmp_path / "usual", Group(), background=False)
    begun, may_copy = threading.Event(), threading.Event()
    real = Exchange.bring

    def late(*args, **options):
        begun.set()
        assert may_copy.wait(PATIENCE)
        return real(*args, **options)

    monkeypatch.setattr(Exchange, "bring", late)
    model, optimizer = make()
    made = Checkpoints(tmp_path / "late", connect(Group()), TrainingState(model, optimizer))
    train(model, optimizer, 2)
    made.save(2, background=True)
    assert begun.wait(PATIENCE)
    stepped = threading.Event()
    x = torch.randn(8, 4, dtype=torch.float64)
    model(x).sum().backward()  # which changes the running statistics in buffers

    def step():
        optimizer.step()
        stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not stepped.wait(0.3)
    may_copy.set()
    thread.join(60)
    assert stepped.is_set()
    made.finish()
    name = "step-000000002.safetensors"
    assert (tmp_path / "late" / name).read_bytes() == (tmp_path / "usual" / name).read_bytes()


def test_training_goes_on_while_a_file_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()
    real = files.call

    def slow(name, *arguments):
        assert name != "write" or may_write.wait(PATIENCE)
        return real(name, *arguments)

    monkeypatch.setattr(files, "call", slow)
    model, optimizer = make()
    made = Checkpoints(tmp_path, connect(Group()), TrainingState(model, optimizer))
    train(model, optimizer, 1)
    made.save(1, background=True)
    for step in (2, 3, 4):
        train(model, optimizer, 1, first=step)
        made.poll()
    assert not list(tmp_path.glob("step-*"))
    may_write.set()
    made.save(4, background=True)  # waits for the one before
    assert (tmp_path / "LATEST").read_text() == "step-000000001.safetensors\n"
    made.save(4)  # is being written
    assert (tmp_path / "LATEST").read_text() == "step-000000004.safetensors\n"


def test_a_failed_background_save_is_reported_and_the_next_one_succeeds(tmp_path, monkeypatch):
    model, optimizer = make()
    made = Checkpoints(tmp_path, connect(Group()), TrainingState(model, optimizer))
    train(model, optimizer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_at", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
        made.save(1, background=True)
        with pytest.raises(CheckpointError, match="broken"):
            made.finish()
    assert list(tmp_path.iterdir()) == []
    made.finish()
    train(model, optimizer, 1, first=2)
    made.save(2, background=True)
    made.finish()
    assert Checkpoints(tmp_path, connect(Group()), TrainingState(*make())).resume() == 2


@pytest.mark.mpi
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: 1 TB")])
def test_a_rank_without_memory_is_an_error_that_a_run_can_tolerate(
    job, together, monkeypatch, error
):
    world = job.world
    made = store(together / "run", world)
    save(made, 1)

    def none(*_, **__):
        raise error

    told = ""
    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(torch, "empty", none)
        try:
            made.save(2, background=True)
            made.finish()
        except CheckpointError as found:
            told = str(found)
    everywhere = world.comm.allgather(told) if world.comm else [told]
    assert len({*everywhere}) == 1, everywhere
    assert "there is no memory for the" in told
    assert world.comm is None or f"rank {world.size - 1} " in told
    assert not made.saving
    save(made, 3, background=True)
    assert found_again(together / "run", world) == 3
