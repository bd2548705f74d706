"""What a data set draws at random on several ranks, and one that gives no sample."""

from __future__ import annotations

import os
import random
import signal
import threading

import numpy as np
import pytest
import torch

from hpc_train.errors import RankError, Stopped
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import STEPS, config

BATCH = 24


class Augmented:
    """Sample i, with numbers drawn from torch, NumPy and Python in between."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        drawn = [float(torch.randn(())), np.random.randn(), random.random()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class Model(torch.nn.Module):
    """Draws, too: from torch in its dropout, from the others by itself."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1).double()
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(self.linear(x)) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())


def alone():
    return Runtime(Group(), Group())


def loop(started, directory, stop_at=None, epochs=3):
    """The samples of each step, on this rank, and the last weights."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    seen = {}
    with Loop(started, directory, model, optimizer, LoopOptions(every=0, keep=0)) as made:
        for _, batches in made.epochs(Augmented(), batch=BATCH, epochs=epochs, seed=5):
            for batch in batches:
                seen[len(seen) + 1] = batch
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                made.step()
                if stop_at == len(seen):
                    os.kill(os.getpid(), signal.SIGTERM)
    return list(seen.values()), [parameter.detach().clone() for parameter in model.parameters()]


def trainer(started, directory, *options, dataset=None, stop_at=None):
    """The micro-batches that this rank has computed the loss of, in their order."""
    seen = []

    def loss(model, batch):
        if model.training:
            seen.append(batch)
        if len(seen) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return model(batch).square().mean()

    torch.manual_seed(0)
    data = dataset or Augmented()
    settings = config(directory, "--data.micro_batch", "2", *options)
    task = TrainingTask(Model(), data, loss, validation=Augmented())
    made = Trainer(settings, task, started)
    try:
        made.train()
    except Stopped:
        assert stop_at
    return seen


def whole(group, mine):
    """The samples of each step over all ranks, from what each has seen."""
    steps = len(mine) * 2 * group.size // BATCH if mine[0].shape[0] == 2 else len(mine)
    shares = group.gathered(torch.cat(mine).view(steps, -1, 4))
    return torch.cat(shares, 1)


def check_loop(started, folder):
    """Against an uninterrupted run of one rank."""
    group = started.world
    expected = group.from_first(lambda: torch.stack(loop(alone(), folder / "one")[0]))
    mine, weights = loop(started, folder / "many")
    with pytest.raises(Stopped):
        loop(started, folder / "cut", stop_at=3)
    rest, resumed = loop(started, folder / "cut")
    assert torch.equal(whole(group, mine), expected)
    assert torch.equal(whole(group, rest), expected[3:])
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed, strict=True))


def check_trainer(started, folder, *options):
    """Against an uninterrupted run of one rank."""
    group = started.world
    expected = group.from_first(lambda: whole(Group(), trainer(alone(), folder / "one", *options)))
    mine = whole(group, trainer(started, folder / "many", *options))
    passes = BATCH // group.size // 2
    first = trainer(started, folder / "cut", *options, stop_at=4 * passes)
    rest = trainer(started, folder / "cut", *options)
    assert len(expected) == STEPS
    assert torch.equal(mine, expected)
    assert torch.equal(whole(group, first), expected[:4])
    assert torch.equal(whole(group, rest), expected[4:])


@pytest.mark.mpi
def test_samples_of_a_loop_are_those_of_one_rank_also_after_a_resume(job, together):
    check_loop(job, together)


def test_samples_of_a_loop_of_one_rank_are_the_same_after_a_resume(tmp_path):
    check_loop(alone(), tmp_path)


DETERMINISTIC = pytest.mark.parametrize("deterministic", ["true", "false"])


@pytest.mark.mpi
@DETERMINISTIC
def test_samples_of_a_trainer_are_those_of_one_rank_also_after_a_resume(
    job, together, deterministic
):
    check_trainer(job, together, "--run.deterministic", deterministic)


@DETERMINISTIC
def test_samples_of_a_trainer_of_one_rank_are_the_same_after_a_resume(tmp_path, deterministic):
    check_trainer(alone(), tmp_path, "--run.deterministic", deterministic)


class Quiet(Augmented):
    """Draws nothing, so that it is read ahead; on one rank something happens at a sample."""

    def __init__(self, rank, at, happens):
        self.rank, self.left, self.happens = rank, at, happens

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0 and self.rank == 0:
            self.happens()
        return torch.full((4,), float(index), dtype=torch.float64)


def leave():
    raise SystemExit(0)


@pytest.mark.mpi
@pytest.mark.parametrize("prefetch", ["0", "2"])
def test_a_data_set_that_leaves_the_program_on_one_rank_ends_all(job, together, prefetch):
    dataset = Quiet(job.world.rank, 3 * BATCH // job.world.size, leave)
    with pytest.raises((RankError, RuntimeError), match=r"the data set raised SystemExit\(0\)"):
        trainer(job, together, "--data.prefetch", prefetch, dataset=dataset)


@pytest.mark.mpi
def test_sigterm_acts_while_one_rank_waits_for_its_data(job, together, monkeypatch):
    monkeypatch.setattr("hpc_train.data.loader.DATA_SET_PATIENCE", 0.05)
    go = threading.Event()
    share = BATCH // job.world.size
    # Three samples are compared between the ranks, and rank 0 reads the first two twice.
    dataset = Quiet(job.world.rank, 3 + 2 + 3 * share, go.wait)

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    clock = threading.Timer(1.0, terminate)
    clock.start()
    try:
        options = ["--run.steps", "100", "--data.validation_every", "0"]
        seen = trainer(job, together, *options, dataset=dataset, stop_at=-1)
    finally:
        clock.cancel()
        go.set()
    assert len(seen) == 3 * share // 2
    assert (together / "checkpoints" / "step-000000003.safetensors").exists()
