"""The ways to average gradients, through the Trainer: same losses, same checkpoints, resume."""

from __future__ import annotations

import logging

import pytest
import safetensors.torch
import torch
from torch.utils.data import TensorDataset

from hpc_train.config import GradientsSection
from hpc_train.config.file import load
from hpc_train.errors import ConfigError
from hpc_train.models import GPT
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.cases import cases
from tests.training.test_trainer import (
    STEPS,
    check_equal,
    config,
    make,
    records,
    stop_after,
    text,
)

ZERO = ["--memory.zero", "1"]
STAGES = ["1", "2"]


def last_checkpoint(directory):
    return directory / "checkpoints" / f"step-{STEPS:09d}.safetensors"


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_shared_parameters_give_the_losses_of_one_rank(group, together, reference, stage):
    make(config(together / "run", "--memory.zero", stage), Runtime(group, group)).train()
    if group.rank == 0:
        check_equal(together / "run", reference)


@pytest.mark.mpi
def test_each_rank_has_its_part_of_the_optimizers_state(job, together):
    trainer = make(config(together / "run", *ZERO), job)
    trainer.train()
    state = trainer.optimizer.state
    mine = sum(slot["exp_avg"].numel() for slot in state.values())
    everyone = job.world.comm.allgather(mine) if job.world.comm else [mine]
    trained = sum(p.numel() for p in trainer.model.parameters())
    assert sum(everyone) == trained
    assert max(everyone) < 1.2 * trained / job.world.size + 50


def with_nothing(settings, started):
    """As `make`, with a parameter without elements."""
    torch.manual_seed(started.world.rank)
    model = GPT(vocab=13, sequence=8, layers=1, hidden=8, heads=2, dropout=0.2)
    model.nothing = torch.nn.Parameter(torch.zeros(0, 3))
    task = TrainingTask(model, text(60, 1), lambda gpt, x: gpt(*x) + gpt.nothing.sum())
    return Trainer(settings, task, started)


@pytest.mark.mpi
@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_do_not_tell_how_memory_was_shared(job, together, stage):
    plain = ["--memory.zero", "0", "--data.validation_every", "0"]
    zero = [*plain, "--memory.zero", stage]
    with_nothing(config(together / "plain", *plain), job).train()
    with_nothing(config(together / "zero", *zero), job).train()
    with_nothing(config(together / "plain", *zero, "--run.steps", f"{STEPS + 1}"), job).train()
    if job.world.rank == 0:
        one, other = (
            safetensors.torch.load_file(last_checkpoint(together / name))
            for name in ("plain", "zero")
        )
        assert one.keys() == other.keys()
        for name in one:
            if name.startswith(("model.", "optim.")):
                assert torch.allclose(one[name], other[name], rtol=1e-10, atol=1e-12), name


LAYOUTS = [
    ["--parallel.tp", "2"],
    ["--parallel.tp", "2", "--parallel.sequence_parallel", "true"],
    ["--parallel.pp", "2", "--data.micro_batch", "3"],
]


def deeper(settings, started):
    """As `make`, with a model that tensor and pipeline parallelism can divide."""
    torch.manual_seed(started.world.rank)
    tokens = torch.randint(12, (60, 9), generator=torch.Generator().manual_seed(1))
    model = GPT(vocab=12, sequence=8, layers=2, hidden=8, heads=2, dropout=0.2)
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    held_out = TensorDataset(tokens[:7, :-1], tokens[:7, 1:])
    task = TrainingTask(model, data, lambda gpt, x: gpt(*x), validation=held_out)
    return Trainer(settings, task, started)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "sequence", "pipeline"])
def test_shared_parameters_under_layouts_and_resumed_without(job, together, layout):
    if job.world.rank == 0:
        deeper(config(together / "one"), Runtime(Group(), Group())).train()
    job.world.barrier()
    deeper(config(together / "run", *ZERO, *layout, "--run.steps", "4"), job).train()
    if job.world.rank == 0:  # goes on alone, with all memory its own
        deeper(config(together / "run"), Runtime(Group(), Group())).train()
        assert [record["loss"] for record in records(together / "run")] == pytest.approx(
            [record["loss"] for record in records(together / "one")], rel=1e-10
        )
    job.world.barrier()


WAYS = {
    "zero": ZERO,
    "zero 2": ["--memory.zero", "2"],
    "bf16": ["--gradients.compression", "bf16", "--gradients.two_level", "off"],
    "topk": ["--gradients.compression", "topk:0.1", "--gradients.two_level", "off"],
    "topk after a warm-up": [
        *["--gradients.compression", "topk:0.1:5", "--gradients.two_level", "off"]
    ],
    "powersgd": ["--gradients.compression", "powersgd:2", "--gradients.two_level", "off"],
    "zero and topk": [*ZERO, "--memory.scope", "node", "--gradients.compression", "topk:0.1"],
    "local steps": ["--gradients.average_every", "3"],
    "without two levels": ["--gradients.two_level", "off"],
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options",
    cases(WAYS, later=set(WAYS) - {"zero and topk", "powersgd", "local steps"}),
)
def test_a_run_stopped_where_it_saves_goes_on_bit_for_bit(job, together, options):
    make(config(together / "whole", *options), job).train()
    stop_after(make(config(together / "cut", *options), job), 3, job)
    make(config(together / "cut", *options), job).train()
    if job.world.rank == 0:
        whole, cut = records(together / "whole"), records(together / "cut")
        for key in ("step", "loss", "grad_norm", "validation_loss"):
            assert [r.get(key) for r in whole] == [r.get(key) for r in cut], key
        mine, theirs = (last_checkpoint(together / name).read_bytes() for name in ("whole", "cut"))
        assert mine == theirs


@pytest.mark.mpi(min_size=2)
def test_what_compression_has_not_sent_is_in_the_checkpoint(job, together):
    make(config(together / "run", *WAYS["topk"]), job).train()
    if job.world.rank == 0:
        saved = safetensors.torch.load_file(last_checkpoint(together / "run"))
        left = {name: tensor for name, tensor in saved.items() if name.startswith("residual.")}
        trained = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
        assert {name.removeprefix("residual.") for name in left} == trained
        assert all(tensor.abs().max() > 0 for tensor in left.values())


@pytest.mark.mpi(min_size=2)
def test_a_start_that_compresses_nothing_says_what_it_drops(job, together, caplog):
    told = []
    for steps, options in ((1, WAYS["topk"]), (2, WAYS["topk"]), (3, [])):
        caplog.clear()
        make(config(together / "run", "--run.steps", str(steps), *options), job).train()
        told.append(sum("compression had not sent" in r.message for r in caplog.records))
    assert told == [0, 0, int(job.world.rank == 0)]


@pytest.mark.mpi(min_size=2)
def test_a_start_that_has_a_layer_still_frozen_says_what_it_drops(job, together, caplog):
    gradients = GradientsSection(compression="topk:0.1", two_level="off")
    data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
    told = []
    for _ in range(2):
        caplog.clear()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = LoopOptions(gradients=gradients, every=2)
        with Loop(job, together, model, optimizer, options) as loop:
            for _, batches in loop.epochs(data, batch=8, epochs=1):
                for (inputs,) in batches:
                    model[0].requires_grad_(loop.step_number > 1)
                    model(inputs).square().mean().backward()
                    loop.step()
                    optimizer.zero_grad()
                    if loop.step_number == 4:
                        loop.stop()
        told += [r.message for r in caplog.records if "had not sent" in r.message]
    expected = "Those of 2 parameters are dropped, because this start does not train them"
    assert [expected in text for text in told] == [True] * (job.world.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_what_compression_has_not_sent_goes_on_under_the_loss_scale_of_the_checkpoint(
    job, together
):
    options = [*WAYS["topk"], "--precision.dtype", "float16"]
    whole, cut = (make(config(together / name, *options), job) for name in ("whole", "cut"))
    whole.assembly.scaler.scale = cut.assembly.scaler.scale = 64.0  # not that of a new run
    whole.train()
    stop_after(cut, 3, job)
    make(config(together / "cut", *options), job).train()
    if job.world.rank == 0:
        expected, found = (
            [record["loss"] for record in records(together / name)] for name in ("whole", "cut")
        )
        assert found == expected


@pytest.mark.mpi(min_size=2)
def test_a_validation_between_two_means_of_local_steps_is_of_their_mean(job, together):
    every = ["--data.validation_every", "2", "--checkpoint.every", "2"]
    local = ["--gradients.average_every", "3", "--run.steps", "2"]
    make(config(together / "run", *every, *local), job).train()
    resumed = make(config(together / "run"), job)
    resumed.checkpoints.resume()
    told = records(together / "run")[-1]["validation_loss"]
    assert resumed.validate() == pytest.approx(told, rel=1e-12)


@pytest.mark.mpi
def test_replicas_are_one_after_local_steps(job, together):
    trainer = make(config(together / "run", *WAYS["local steps"]), job)
    trainer.train()
    flat = torch.cat([p.detach().view(-1) for p in trainer.model.parameters()])
    same = job.world.comm.allgather(flat.numpy().tobytes()) if job.world.comm else [b""]
    assert len(set(same)) == 1
    losses = [record["loss"] for record in records(together / "run")] if not job.world.rank else [0]
    assert losses[-1] <= losses[0]


@pytest.mark.mpi
def test_the_end_tells_what_averaging_took(job, together, caplog):
    with caplog.at_level(logging.INFO):
        make(config(together / "run"), job).train()
    told = [r.message for r in caplog.records if r.message.startswith("averaged ")]
    assert len(told) == (job.world.size > 1)


@pytest.mark.parametrize(
    "options",
    [
        ["--gradients.average_every", "2", "--memory.zero", "1"],
        ["--gradients.average_every", "2", "--gradients.compression", "bf16"],
        ["--gradients.average_every", "2", "--gradients.engine", "horovod"],
        ["--memory.zero", "1", "--gradients.engine", "horovod"],
        ["--memory.zero", "1", "--gradients.compression", "bf16"],
        ["--memory.zero", "1", "--memory.scope", "rack"],
        ["--memory.zero", "1", "--gradients.two_level", "off"],
        ["--gradients.average_every", "0"],
        ["--memory.zero", "2", "--memory.scope", "node", "--gradients.compression", "bf16"],
        ["--memory.zero", "4"],
    ],
)
def test_what_does_not_go_together_is_refused(options):
    with pytest.raises(ConfigError, match="average_every|memory.zero|memory.scope"):
        load(None, options)
