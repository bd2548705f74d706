"""memory.offload: the optimizer's state in a file on the node's own disk."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hpc_train.errors import ConfigError, UserError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import offload
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import STEPS, check_equal, config, make

ALONE = Runtime(Group(), Group())
FILES = ["step-000000002.safetensors", "step-000000003.safetensors"]


def offloaded(directory, *more):
    disk = directory.parent / "disk"
    disk.mkdir(exist_ok=True)
    return config(directory, "--memory.offload", str(disk), *more)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("zero", ["0", "1", "2"])
def test_losses_are_those_without_it(group, together, reference, zero):
    trainer = make(offloaded(together / "run", "--memory.zero", zero), Runtime(group, group))
    trainer.train()
    place = trainer.assembly.checkpoints.state.place
    for parameter, slots in trainer.optimizer.state.items():
        assert slots["exp_avg"].data_ptr() == place(parameter, "exp_avg").data_ptr()
    trainer.close()
    assert not list((together / "disk").iterdir()), "the file has no name"
    if group.rank == 0:
        check_equal(together / "run", reference)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_goes_on_with_and_without_it(tmp_path, first, optimizer):
    more = ["--optimizer.name", optimizer]
    make(config(tmp_path / "reference", *more), ALONE).train()
    for number, steps in enumerate((3, STEPS)):
        options = [*more, "--run.steps", str(steps)]
        used = offloaded if first == (number == 0) else config
        with make(used(tmp_path / "run", *options), ALONE) as trainer:
            trainer.train()
    check_equal(tmp_path / "run", tmp_path / "reference")


class Partly(nn.Module):
    """A model whose layer `later` may be frozen. No forward pass uses its parameter `unused`."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.later = nn.Linear(4, 6), nn.Linear(6, 1)
        self.unused = nn.Parameter(torch.ones(5))
        self.later.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.later(torch.tanh(self.first(x))).square()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("zero", ["0", "1"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_only_what_has_had_a_gradient_has_state(group, together, zero, optimizer):
    """So checkpoints have the bytes that they have without it, and an unused one may be frozen."""
    data = TensorDataset(torch.linspace(-1, 1, 48, dtype=torch.float64).view(12, 4))

    def trained(settings, *, frozen):
        task = TrainingTask(Partly(frozen), data, lambda model, batch: model(*batch).mean())
        trainer = Trainer(settings, task, Runtime(group, group))
        trainer.train()
        return trainer

    options = ["--memory.zero", zero, "--optimizer.name", optimizer, "--data.batch", "4"]
    options += ["--data.validation_every", "0"]
    saved, placed = [], []
    for name, used in (("plain", config), ("kept", offloaded)):
        first = used(together / name, *options, "--run.steps", "2", "--checkpoint.every", "0")
        trained(first, frozen=True).close()
        resumed = trained(used(together / name, *options, "--run.steps", "3"), frozen=False)
        if used is offloaded:
            state = resumed.assembly.checkpoints.state
            for parameter, slots in resumed.optimizer.state.items():
                placed += [
                    slots[slot].data_ptr() == state.place(parameter, slot).data_ptr()
                    for slot in slots.keys() - {"step"}
                ]
        resumed.close()
        saved.append([(together / name / "checkpoints" / file).read_bytes() for file in FILES])
    assert all(placed)
    assert saved[0] == saved[1]


def test_a_disk_without_room_is_told_at_the_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(offload.os, "posix_fallocate", full)
    with pytest.raises(
        UserError, match=r"cannot take \S+ [KM]iB of .* \(No space left on device\): give a fold"
    ):
        make(offloaded(tmp_path / "run"), ALONE)
    assert not list((tmp_path / "disk").iterdir())


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(
        UserError, match=r"take the optimizer's state \(No such file.*\): give .* which is there"
    ):
        make(config(tmp_path / "run", "--memory.offload", str(tmp_path / "no")), ALONE)


def test_a_parameter_may_have_gaps_in_its_memory(tmp_path):
    found = []
    for folder in (tmp_path, None):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(8, 8)[:, :3])
        optimizer = torch.optim.AdamW([parameter])
        kept = offload.OffloadedState(optimizer, folder) if folder else None
        for _ in range(3):
            parameter.grad = torch.randn(8, 3)
            optimizer.step()
        if kept is not None:
            kept.close()
        found.append(parameter.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("wrong", ["gradients", "here/state", ""])
def test_other_values_are_refused(tmp_path, wrong):
    with pytest.raises(
        ConfigError, match=r"memory\.offload is .*: give none, optimizer, or the full path"
    ):
        config(tmp_path, f"--memory.offload={wrong}")
