"""What `memory.zero: auto` takes, and that it is never an error."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_train.collectives import node
from hpc_train.config import GradientsSection
from hpc_train.errors import SetupError
from hpc_train.gradients.zero import ShardedAverager
from hpc_train.models import GPT
from hpc_train.training.sharing import SharingFacts, choose_zero
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.programs import only_line, run
from tests.training.test_averaging import ZERO
from tests.training.test_trainer import check_equal, config, records, text


def ours(settings, started, **keywords) -> Trainer:
    """As test_trainer's `make`, for a model that only the optimizer writes to."""
    torch.manual_seed(started.world.rank)
    model = GPT(vocab=13, sequence=8, layers=1, hidden=8, heads=2, dropout=0.2)
    task = TrainingTask(
        model,
        text(60, 1),
        lambda gpt, batch: gpt(*batch),
        validation=text(11, 2),
        **{"private_parameters": True, **keywords},
    )
    return Trainer(settings, task, started)


def shares(trainer) -> bool:
    return isinstance(trainer.averager, ShardedAverager)


@pytest.mark.parametrize("together", [2, 8])
@pytest.mark.parametrize("replicas", [8, 64])
def test_our_models_share_inside_nodes(together, replicas):
    assert (
        choose_zero(GradientsSection(), SharingFacts(replicas=replicas, together=together))[0] == 1
    )


@pytest.mark.parametrize(
    ("section", "facts", "why"),
    [
        ({}, {"replicas": 1, "together": 1}, "one replica"),
        ({}, {"replicas": 4, "together": 1}, "a node has one replica"),
        ({}, {"device": "cuda"}, "cuda"),
        ({}, {"engine": "horovod"}, "engine is horovod"),
        ({}, {"engine": "nccl"}, "engine is nccl"),
        ({"two_level": "off"}, {}, "two_level is off"),
        ({}, {"overlap": "b and a lie in the same memory"}, "same memory"),
        ({"compression": "topk:0.1"}, {}, "compression is topk:0.1"),
        ({"average_every": 4}, {"engine": "auto"}, "average_every is 4"),
        ({}, {"sparse": True}, "sparse gradients"),
        ({}, {"private": False}, "once per rank"),
    ],
)
def test_otherwise_memory_is_not_shared_and_the_reason_is_named(section, facts, why):
    zero, reason = choose_zero(GradientsSection(**section), SharingFacts(**facts))
    assert zero == 0
    assert why in reason


@pytest.mark.mpi
def test_auto_shares_our_model_and_gives_the_losses_of_one_rank(job, together, reference, caplog):
    with caplog.at_level(logging.INFO):
        trainer = ours(config(together / "run"), job)
    assert shares(trainer) == (job.world.size > 1)
    told = [r.message for r in caplog.records if r.message.startswith("memory.zero auto takes")]
    assert len(told) == (job.world.rank == 0)
    trainer.train()
    if job.world.rank == 0:
        check_equal(together / "run", reference)


@pytest.mark.mpi
def test_parameters_that_others_may_write_to_are_not_shared(job, together):
    trainer = ours(config(together / "run"), job, private_parameters=False)
    assert not shares(trainer)
    told = ours(config(together / "asked", *ZERO), job, private_parameters=False)
    assert shares(told) == (job.world.size > 1)


@pytest.mark.mpi
def test_layers_with_sparse_gradients_are_not_shared(job, together):
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    data = TensorDataset(torch.zeros(60, dtype=torch.int64))
    task = TrainingTask(
        model, data, lambda module, batch: module(batch[0]).mean(), private_parameters=True
    )
    settings = config(together / "run", "--data.validation_every", "0")
    trainer = Trainer(settings, task, job)
    assert not shares(trainer)


TRIAL = ["--run.deterministic", "false"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("refused", "options"),
    [(1, TRIAL), (1, []), (2, [])],
    ids=["a trial", "gradients", "parameters"],
)
def test_too_little_shared_memory_is_no_error_of_auto(
    job, together, reference, monkeypatch, refused, options
):
    """Whichever request for memory fails, the Trainer goes on as with memory.zero 0."""
    check, asked = node._check_room, []

    def full_once(nbytes):
        asked.append(nbytes)
        if len(asked) == refused:
            raise SetupError("/dev/shm is full")
        check(nbytes)

    monkeypatch.setattr(node, "_check_room", full_once)
    trainer = ours(config(together / "run", *options), job)
    assert len(asked) > refused
    assert not shares(trainer)
    trainer.train()
    if job.world.rank == 0:
        check_equal(together / "run", reference)


@pytest.mark.mpi
def test_a_run_goes_on_where_auto_takes_something_else(job, together, reference):
    ours(config(together / "run", "--run.steps", "4"), job).train()
    ours(config(together / "run", "--gradients.two_level", "off"), job).train()
    if job.world.rank == 0:
        mine, theirs = (
            [record["loss"] for record in records(path)] for path in (together / "run", reference)
        )
        assert mine == pytest.approx(theirs, rel=1e-10)


TAKES_1 = "memory.zero auto takes 1: ranks share parameters and the optimizer's work"


@pytest.mark.slow("three jobs")
def test_the_program_says_what_auto_takes(program):
    alone = program.train("alone")
    assert "memory.zero auto takes 0: the job has one replica of the model" in alone.stdout
    both = program.train("both", launcher="mpirun", ranks=2)
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("memory.zero auto takes") == 1
    assert TAKES_1 in both.stdout
    asked = program.train("asked", "--memory.zero", "0", launcher="mpirun", ranks=2)
    assert asked.returncode == 0, asked.stderr
    assert "memory.zero auto takes" not in asked.stdout
    for name in ("both", "asked"):
        assert program.losses(name) == pytest.approx(program.losses("alone"), rel=1e-10)


def test_what_zero_takes_is_named(program):
    done = run(sys.executable, "-m", "hpc_train", "train", "--memory.zero", "some")
    assert done.returncode == 2
    assert "it takes one of auto, 0, 1" in only_line(done.stderr)
