"""The Trainer on samples of unequal lengths, in micro-batches by length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_train.data import Mixture
from hpc_train.errors import ConfigError
from hpc_train.models.language import counted_targets
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import alone, check_equal, config, text
from tests.training.test_trainer_unequal import gpt


class Sentences:
    """Texts of 1 to 8 tokens, padded to the longest of a batch, and to an even number."""

    def __init__(self, samples, seed):
        generator = np.random.default_rng(seed)
        self.texts = [
            torch.from_numpy(generator.integers(0, 14, generator.integers(2, 10)))
            for _ in range(samples)
        ]
        self.sizes = np.array([len(one) // 2 * 2 for one in self.texts])
        self.shapes = set()

    def __len__(self):
        return len(self.texts)

    def lengths(self, indices):
        return self.sizes[indices]

    def fetch(self, indices):
        width = int(self.lengths(indices).max())
        tokens = torch.zeros(len(indices), width, dtype=torch.int64)
        targets = torch.full_like(tokens, -100)
        for row, index in enumerate(indices):
            some = self.texts[index]
            tokens[row, : len(some) - 1], targets[row, : len(some) - 1] = some[:-1], some[1:]
        self.shapes.add(tuple(tokens.shape))
        return tokens, targets


def train(settings, started, **model):
    training = Sentences(90, 1)
    task = TrainingTask(
        gpt(**model),
        training,
        validation=Sentences(33, 2),
        counted=counted_targets,
        private_parameters=True,
    )
    with Trainer(settings, task, started) as trainer:
        trainer.train()
    return training.shapes


LAYOUTS = {
    "dp": ["--memory.zero", "0"],
    "few": ["--memory.zero", "0", "--data.micro_tokens", "4"],
    "zero-2": ["--memory.zero", "2"],
    "zero-3": ["--memory.zero", "3"],
    "pp": ["--parallel.pp", "2", "--parallel.schedule", "zero_bubble"],
    "tp": ["--parallel.tp", "2", "--parallel.sequence_parallel", "true"],
    "tp-pp": ["--parallel.tp", "2", "--parallel.pp", "2"],
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("over", "batch"), [("token", "22"), pytest.param("sample", "6", marks=pytest.mark.long)]
)
def test_losses_are_those_of_whole_batches_on_one_rank(job, together, over, batch):
    options = ["--data.loss", over, "--data.batch", batch]
    if job.world.rank == 0:
        train(config(together / "one", *options), Runtime(Group(), Group()), dropout=0.2)
    job.world.barrier()
    for name, layout in LAYOUTS.items():
        settings = config(together / name, *options, "--data.micro_tokens", "20", *layout)
        shapes = train(settings, job, dropout=0.2)
        assert len(set().union(*job.world.gathered(shapes))) > 3, name
        if job.world.rank == 0:
            check_equal(together / name, together / "one")


def test_a_mixture_is_cut_by_length_and_has_the_losses_of_whole_batches(tmp_path):
    def trained(name, *options):
        training = Mixture([(Sentences(60, 1), 2), (Sentences(40, 3), 1)], padding=(0, -100))
        given = ["--data.loss", "token", "--data.batch", "20", "--data.validation_batches", "1"]
        settings = config(tmp_path / name, *given, *options)
        task = TrainingTask(gpt(), training, validation=Sentences(33, 2), counted=counted_targets)
        with Trainer(settings, task, alone()) as trainer:
            trainer.train()
        return set().union(*(one.shapes for one in training.datasets))

    trained("whole")
    assert all(rows * width <= 20 for rows, width in trained("cut", "--data.micro_tokens", "20"))
    check_equal(tmp_path / "cut", tmp_path / "whole")


def test_no_micro_batch_has_more_tokens_unless_one_sample_has(tmp_path):
    shapes = train(config(tmp_path, "--data.micro_tokens", "6"), alone())
    assert all(rows * width <= 6 or rows == 1 for rows, width in shapes)
    assert max(width for _, width in shapes) == 8


def test_a_data_set_without_lengths_is_refused(tmp_path):
    settings = config(tmp_path, "--data.micro_tokens", "20")
    with pytest.raises(ConfigError, match="no method lengths"):
        Trainer(settings, TrainingTask(gpt(), text(60, 1)), alone())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.micro_batch", "2"], "both given"),
        (["--gradients.average_every", "2"], "data.micro_tokens is given, but the replicas'"),
    ],
)
def test_combinations_that_cannot_work_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, "--data.micro_tokens", "20", *options)
