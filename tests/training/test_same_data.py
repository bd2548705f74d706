"""Data sets that differ between ranks, or from that of the checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import random_split

from hpc_train.errors import UserError
from hpc_train.training.loop import Loop
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_loop_options import BATCH, alone, data, make_model, sgd
from tests.training.test_trainer import config


def train(runtime, folder, dataset, *, steps=None, held_out=None):
    """Train for one epoch, or up to a step; returns the weights."""
    model = make_model()
    optimizer = sgd(model.parameters())
    with Loop(runtime, folder, model, optimizer) as loop:
        for _, batches in loop.epochs(dataset, batch=BATCH, epochs=1):
            for inputs, targets in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                if loop.step_number == steps:
                    loop.stop()
        if held_out is not None:
            loop.evaluate(held_out, lambda batch: batch[1].double(), batch=BATCH)


def split(seed):
    return random_split(data(), [0.75, 0.25], torch.Generator().manual_seed(seed))


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["epochs", "evaluate"])
def test_ranks_with_data_sets_of_their_own_are_refused(job, together, where):
    if job.world.size == 1:
        pytest.skip("one rank has nobody to differ from")
    last = job.world.size - 1
    training, held_out = split(int(job.world.rank == last))
    line = f"rank {last} .* the samples of the data set.* differ from those of rank 0.*seed the"
    with pytest.raises(UserError, match=line):
        if where == "epochs":
            train(job, together, training)
        else:
            train(job, together, data(), held_out=held_out)


@pytest.mark.mpi
@pytest.mark.parametrize("which", ["dataset", "validation"])
def test_a_trainer_refuses_them_too(job, together, which):
    if job.world.size == 1:
        pytest.skip("one rank has nobody to differ from")
    of_rank = dict(zip(("dataset", "validation"), split(int(job.world.rank == 1)), strict=True))
    given = {"dataset": data(), "validation": data(), which: of_rank[which]}
    with pytest.raises(UserError, match="rank 1 .* data set differ from those of rank 0"):
        task = TrainingTask(make_model(), loss=lambda model, batch: model(batch[0]).mean(), **given)
        Trainer(config(together), task, job)


class NeverTwice:
    """Its generator comes from the system, so nobody can seed it."""

    def __len__(self):
        return len(data())

    def __getitem__(self, index):
        return torch.from_numpy(np.random.default_rng().random(5)), index % 3


@pytest.mark.mpi
def test_samples_that_do_not_repeat_are_told_and_not_refused(job, together, caplog):
    train(job, together, NeverTwice())
    told = "two reads of the same samples gave different values" in caplog.text
    assert told == (job.world.rank == 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_resume_with_other_samples_is_told(tmp_path, caplog, seed):
    train(alone(), tmp_path, split(0)[0], steps=2)
    train(alone(), tmp_path, split(seed)[0])
    assert ("the data set gives other samples than when" in caplog.text) == bool(seed)
