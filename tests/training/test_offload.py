"""memory.offload: the optimizer's state in a file on the node's own disk."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from hpc_train.errors import ConfigError, UserError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import offload
from tests.training.test_trainer import STEPS, check_equal, config, make

ALONE = Runtime(Group(), Group())


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


def test_a_disk_without_room_is_told_at_the_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(offload.os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"cannot take .* \(No space left on device\): give a fold"):
        make(offloaded(tmp_path / "run"), ALONE)
    assert not list((tmp_path / "disk").iterdir())


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match=r"No such file or directory\): give .* which is there"):
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
