"""What the content of checkpoints keeps in memory."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn

from hpc_train.checkpoint import Checkpoints, TrainingState
from hpc_train.checkpoint.restore import Tensors
from hpc_train.collectives import connect
from hpc_train.errors import CheckpointError, CheckpointMismatch
from hpc_train.mpi.group import Group


def test_a_second_resume_frees_the_optimizers_state_of_the_first(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = Checkpoints(tmp_path, connect(Group()), TrainingState(model, optimizer))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoints.save(1)
    old = weakref.ref(optimizer.state[model.weight]["exp_avg"])
    checkpoints.resume()
    gc.collect()
    assert old() is None


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (["a1", "b2", "c3"], "from other data than d: from 2 data sets, and here are 3: set data"),
        ("a1", "from other data than d: from 2 data sets, and here are 1: set data.path back"),
        (["b2", "a1"], "from the same data in another order than d: set data.path back"),
        (["a1", "c3"], "other data than d: the manifest of data set 2 had the hash b2, here it is"),
    ],
)
def test_other_data_is_told_without_a_list(tmp_path, now, told):
    model = nn.Linear(2, 2)
    state = TrainingState(model, torch.optim.SGD(model.parameters()))
    runs = [
        Checkpoints(tmp_path, connect(Group()), state, identity={"data": data}, where="d")
        for data in (["a1", "b2"], now)
    ]
    runs[0].save(1)
    with pytest.raises(CheckpointMismatch, match=told) as refused:
        runs[1].resume()
    assert "[" not in str(refused.value)


def without_memory(monkeypatch, copies: int) -> list[weakref.ref[torch.Tensor]]:
    """Let the copy after the given number of copies fail; returns the copies that were made."""
    clone, made = torch.Tensor.clone, []

    def limited(tensor, **how):
        if len(made) == copies:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 MiB")
        copied = clone(tensor, **how)
        made.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(torch.Tensor, "clone", limited)
    return made


@pytest.mark.mpi
@pytest.mark.parametrize("background", [False, True])
def test_the_save_after_one_that_had_no_memory_is_complete(job, together, monkeypatch, background):
    """A layer that trains from step 2 on has a state from then on, which no save has held."""
    odd = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # is saved as a copy
    model = nn.Sequential(nn.Linear(3, 4), odd)
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = Checkpoints(together, connect(job.world), TrainingState(model, optimizer))
    told = ""
    for step in (1, 2, 3):
        model[0].requires_grad_(step > 1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        checkpoints.poll()
        with monkeypatch.context() as patch:
            if step == 2 and job.world.rank == job.world.size - 1:
                without_memory(patch, copies=1)
            try:
                checkpoints.save(step, background=background)
                checkpoints.finish()
            except CheckpointError as error:  # all ranks raise it
                told = str(error)
    checkpoints.close()
    assert "no memory for copies of the tensors" in told
    assert ("set checkpoint.background to false" in told) == background
    if job.world.rank == 0:
        first, last = (Tensors(together / f"step-{step:09d}.safetensors") for step in (1, 3))
        slots = ("exp_avg", "exp_avg_sq", "step")
        new = {f"optim.0.{name}.{slot}" for name in ("weight", "bias") for slot in slots}
        assert {*last.names} - {*first.names} == new


def test_a_save_that_has_no_memory_keeps_no_copies(tmp_path, monkeypatch):
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    checkpoints = Checkpoints(tmp_path, connect(Group()), TrainingState(model, optimizer))
    model(torch.ones(1, 3, 2, 2)).sum().backward()
    optimizer.step()
    copies = without_memory(monkeypatch, copies=1)
    with suppress(CheckpointError):
        checkpoints.save(1)
    gc.collect()
    assert [copied() for copied in copies] == [None]
