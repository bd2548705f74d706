"""The Trainer on several ranks, against one rank."""

from __future__ import annotations

import json
import logging
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.cli.checkpoint import show_list
from hpc_train.collectives import connect
from hpc_train.config import RunConfig
from hpc_train.config.file import load
from hpc_train.errors import ConfigError, NotFiniteError, Stopped, UserError
from hpc_train.models import GPT
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import averaging
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.conftest import records

needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
STEPS = 7


def config(directory, *options) -> RunConfig:
    fixed = ["--run.dir", str(directory), "--run.steps", str(STEPS), "--run.log_every", "1"]
    fixed += ["--data.batch", "24", "--data.validation_every", "3", "--precision.dtype", "float64"]
    fixed += ["--optimizer.lr", "0.01", "--optimizer.clip_norm", "0.8", "--checkpoint.every", "3"]
    fixed += ["--run.preflight", "false", "--run.deterministic", "true"]
    return load(None, [*fixed, *options])


def text(samples, seed):
    tokens = torch.randint(13, (samples, 9), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def make(settings, started) -> Trainer:
    torch.manual_seed(started.world.rank)
    model = GPT(vocab=13, sequence=8, layers=1, hidden=8, heads=2, dropout=0.2)
    task = TrainingTask(model, text(60, 1), lambda gpt, batch: gpt(*batch), validation=text(11, 2))
    return Trainer(settings, task, started)


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_limited_validation_takes_the_same_samples_on_every_layout(group, together):
    torch.manual_seed(group.rank)
    held_out = text(61, 2)
    model = GPT(vocab=13, sequence=8, layers=1, hidden=8, heads=2)
    task = TrainingTask(model, text(60, 1), lambda gpt, batch: gpt(*batch), validation=held_out)
    options = ["--data.batch", "12", "--data.validation_batches", "2", "--memory.zero", "0"]
    trainer = Trainer(config(together / "run", *options), task, Runtime(group, group))
    found = trainer.validate()
    places = [place * 61 // 24 for place in range(24)]
    tokens, targets = (column[places] for column in held_out.tensors)
    with torch.no_grad():
        expected = trainer.model.eval()(tokens, targets).item()
    assert found == pytest.approx(expected, rel=1e-12)


class Normed(nn.Module):
    """A BatchNorm that may be frozen, and one that is trained."""

    def __init__(self):
        super().__init__()
        self.frozen, self.norm, self.out = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.norm(self.frozen(x)))


def trained_with_norms(directory, model):
    draws = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(60, 3, generator=draws).double() + 2)
    task = TrainingTask(model, data, lambda m, batch: m(batch[0]).square().mean(), validation=data)
    Trainer(config(directory), task, alone()).train()


def test_a_layer_that_is_frozen_in_eval_mode_stays_so(tmp_path):
    model = Normed().double()
    model.frozen.eval().requires_grad_(False)
    trained_with_norms(tmp_path, model)
    assert not model.frozen.training
    assert not model.frozen.running_mean.any()
    assert model.norm.training
    assert model.norm.running_mean.all()


def test_a_part_in_train_mode_of_a_model_in_eval_mode_is_all_that_is(tmp_path, caplog):
    model = Normed().double().eval()
    model.norm.train()
    with caplog.at_level(logging.INFO):
        trained_with_norms(tmp_path, model)
    assert "stay so (the model itself, frozen, out)" in caplog.text
    assert not model.frozen.running_mean.any()
    assert model.norm.running_mean.all()


def test_a_model_that_comes_in_eval_mode_is_trained_whole(tmp_path):
    model = Normed().double().eval()
    trained_with_norms(tmp_path, model)
    assert model.norm.running_mean.all()
    assert model.frozen.running_mean.all()


class Remembering(nn.Linear):
    """Keeps a mean of its samples beside a BatchNorm. The layer that came frozen is unfrozen."""

    def __init__(self, averaged_by=None):
        super().__init__(1, 1)
        self.norm, self.late, self.averaged_by = nn.BatchNorm1d(1), nn.Linear(1, 1), averaged_by
        self.late.requires_grad_(requires_grad=False)
        self.register_buffer("middle", torch.full((1,), torch.nan))

    def forward(self, x):
        if self.training:
            middle = x.mean(0)
            if self.averaged_by is not None:
                self.averaged_by.sum_(middle)
            self.middle = middle
            self.late.requires_grad_()
        return super().forward(self.late(self.norm(x)))


def trained_remembering(settings, started, averaged_by=None):
    values = torch.linspace(0, 1, 48, dtype=torch.float64)[:, None]
    model = Remembering(averaged_by)
    task = TrainingTask(model, TensorDataset(values), lambda m, batch: m(batch[0]).square().mean())
    with Trainer(settings, task, started) as trainer:
        trainer.train()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("averaged", [False, True])
def test_a_buffer_that_differs_between_ranks_is_told_once(group, together, caplog, averaged):
    over = connect(group)
    settings = config(together, "--data.validation_every", "0", "--memory.zero", "0")
    trained_remembering(settings, Runtime(group, group), over if averaged else None)
    told = caplog.text.count("the buffer middle differs between ranks")
    assert told == (group.rank == 0 and group.size > 1 and not averaged)
    assert caplog.text.count("the buffer ") == told
    over.close()


def test_parameters_that_are_unfrozen_too_late_are_told_once(tmp_path, caplog):
    trained_remembering(config(tmp_path, "--data.validation_every", "0"), alone())
    line = "no optimizer has 2 parameters of the model that came frozen, such as late.weight"
    assert caplog.text.count(line) == 1


class Paired(nn.Linear):
    """Returns its loss, as models of other libraries do."""

    def forward(self, x, y):
        return nn.functional.mse_loss(super().forward(x), y)


@pytest.mark.ranks(1, 2)
def test_a_model_without_a_loss_gets_the_parts_of_a_batch_in_order_or_by_name(group, together):
    values = torch.linspace(0, 1, 48, dtype=torch.float64)[:, None]
    found = []
    for data in (TensorDataset(values, 2 * values), [{"y": 2 * x, "x": x} for x in values]):
        torch.manual_seed(1)
        folder = together / type(data).__name__
        task = TrainingTask(Paired(1, 1), data, validation=data)
        with Trainer(config(folder), task, Runtime(group, group)) as trainer:
            trainer.train()
            found.append(trainer.validate())
    assert found[0] == found[1]


def check_equal(directory, reference):
    mine, theirs = records(directory), records(reference)
    assert [record["step"] for record in mine] == list(range(1, STEPS + 1))
    for a, b in zip(mine, theirs, strict=True):
        for key in ("loss", "lr", "grad_norm", "epoch", "validation_loss"):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-10), key


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cut", [[], ["--data.micro_batch", "1"], ["--data.micro_batch", "2"]])
def test_losses_are_those_of_one_rank(group, together, reference, cut):
    make(config(together / "run", *cut), Runtime(group, group)).train()
    if group.rank == 0:
        check_equal(together / "run", reference)


@needs_horovod
@pytest.mark.mpi
def test_engine_horovod_too(job, together, reference):
    settings = config(together / "run", "--gradients.engine", "horovod", "--data.micro_batch", "2")
    make(settings, job).train()
    if job.world.rank == 0:
        check_equal(together / "run", reference)


def test_engine_horovod_needs_no_horovod_and_no_mpi_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(averaging, "start_horovod", lambda *_, **__: pytest.fail("was started"))
    make(config(tmp_path, "--gradients.engine", "horovod"), alone()).train()


PIPELINE = ["--parallel.pp", "2", "--parallel.schedule", "zero_bubble", "--data.micro_batch", "3"]


def stop_after(trainer, number, job):
    """Let a rank ask for a stop after a step; returns how the training stops."""
    original = trainer._train_step

    def step(step, report):
        original(step, report)
        if step.number == number and job.world.rank == job.world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._train_step = step
    with pytest.raises(Stopped) as caught:
        trainer.train()
    return caught.value


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options",
    [
        ["--gradients.engine", "mpi"],
        pytest.param(["--gradients.engine", "horovod"], marks=needs_horovod),
        PIPELINE,
    ],
    ids=["engine-mpi", "engine-horovod", "pipeline"],
)
def test_a_stopped_run_goes_on_bit_for_bit(job, together, options):
    make(config(together / "whole", *options), job).train()
    trainer = make(config(together / "cut", *options), job)
    assert stop_after(trainer, 4, job).step == 4
    make(config(together / "cut", *options), job).train()
    if job.world.rank == 0:
        whole, cut = records(together / "whole"), records(together / "cut")
        for key in ("step", "loss", "grad_norm", "validation_loss"):
            assert [r.get(key) for r in whole] == [r.get(key) for r in cut]
        last = f"checkpoints/step-{STEPS:09d}.safetensors"
        assert (together / "whole" / last).read_bytes() == (together / "cut" / last).read_bytes()


class Counting(torch.nn.Linear):
    """Counts its forward passes beside its tensors."""

    count = 0

    def forward(self, inputs):
        self.count += self.training
        return super().forward(inputs)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("zero", [0, 1])
def test_what_modules_keep_beside_tensors_goes_on(group, together, zero):
    for steps in (3, STEPS):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), Counting(3, 1))
        data = TensorDataset(torch.randn(48, 3, dtype=torch.float64))
        loss = lambda m, batch: m(batch[0]).square().mean()  # noqa: E731
        task = TrainingTask(model, data, loss)
        options = ["--run.steps", str(steps), "--data.validation_every", "0"]
        settings = config(together, *options, "--memory.zero", str(zero))
        with Trainer(settings, task, Runtime(group, group)) as trainer:
            trainer.train()
        assert model[1].count == steps


@pytest.mark.ranks(2)
def test_what_modules_keep_beside_tensors_is_refused_if_the_model_is_cut(group, together):
    class Keeping(GPT):
        get_extra_state, set_extra_state = Counting.get_extra_state, Counting.set_extra_state
        count = 0

    model = Keeping(vocab=13, sequence=8, layers=2, hidden=8, heads=2)
    task = TrainingTask(model, text(60, 1), lambda gpt, batch: gpt(*batch))
    settings = config(together, *PIPELINE, "--data.validation_every", "0")
    with pytest.raises(UserError, match="get_extra_state.* of a model that is cut over ranks"):
        Trainer(settings, task, Runtime(group, group))


@pytest.mark.mpi
def test_a_batch_that_the_ranks_cannot_share_is_refused_on_all(job, together):
    with pytest.raises(ConfigError, match="data.batch 13 is not divisible by") as caught:
        make(config(together / "run", "--data.batch", "13"), job)
    assert job.world.size == 1 or caught.value.agreed


def alone():
    return Runtime(Group(), Group())


def test_other_sizes_than_the_jobs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="dp 3 x tp 1 x pp 1 is 3, the job has 1 rank"):
        make(config(tmp_path, "--parallel.dp", "3"), alone())


def test_steps_or_epochs_are_needed(tmp_path):
    settings = load(None, ["--run.dir", str(tmp_path), "--data.batch", "24"])
    with pytest.raises(ConfigError, match="neither run.steps nor run.epochs"):
        make(settings, alone())


def test_epochs_are_counted_in_whole_batches(tmp_path):
    settings = load(None, ["--run.dir", str(tmp_path), "--data.batch", "24", "--run.epochs", "3"])
    assert make(settings, alone()).plan.last == 6


def test_a_finished_run_has_nothing_to_do(tmp_path):
    make(config(tmp_path), alone()).train()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    make(config(tmp_path), alone()).train()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_same_run_can_be_made_longer(tmp_path):
    make(config(tmp_path), alone()).train()
    make(config(tmp_path, "--run.steps", "9"), alone()).train()
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 10))


def test_a_start_says_which_record_it_has_dropped(tmp_path):
    make(config(tmp_path, "--run.steps", "6"), alone()).train()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "time": 5.5}\n')  # a job was killed after this step
    make(config(tmp_path), alone()).train()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    first, _, second, _ = map(json.loads, lines)
    assert "reached" not in first
    assert (second["after"], second["reached"], second["reached_time"]) == (6, 7, 5.5)


def test_a_failure_tells_the_last_finished_step_also_if_that_was_not_logged(tmp_path):
    trainer = make(config(tmp_path, "--run.log_every", "100"), alone())
    original = trainer._train_step

    def failing(step, report):
        if step.number == 6:
            raise ValueError("no sixth step")
        original(step, report)

    trainer._train_step = failing
    with pytest.raises(ValueError, match="no sixth step"):
        trainer.train()
    end = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["step"], end["reason"]) == ("end", 5, "failed")


def test_records_say_what_the_design_promises(tmp_path):
    make(config(tmp_path), alone()).train()
    promised = {"step", "epoch", "loss", "lr", "grad_norm", "samples_per_second"}
    phases = ("data", "forward", "backward", "comm", "optimizer", "save", "evaluation")
    promised |= {"step_seconds", "memory_gb", "time", *(f"{phase}_seconds" for phase in phases)}
    for record in records(tmp_path):
        assert promised <= record.keys()
        assert ("validation_loss" in record) == (record["step"] in (3, 6, 7))
        assert sum(record[f"{phase}_seconds"] for phase in phases) <= record["step_seconds"]
        assert record["forward_seconds"] > 0 < record["backward_seconds"]
    start, end = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (start["event"], start["layout"]) == ("start", {"dp": 1, "tp": 1, "pp": 1})
    assert (end["event"], end["step"], end["reason"]) == ("end", 7, "finished")
    assert load(tmp_path / "config.yaml") == config(tmp_path)
    assert "step 3: checkpoint" in (tmp_path / "logs" / "rank-000.log").read_text()


def overflowing(settings) -> Trainer:
    """A training that has infinite numbers from its fifth step on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    data = TensorDataset(torch.ones(24, 1), torch.zeros(24, 1))
    steps = []

    def loss(module, batch):
        steps.append(batch)
        return (module(batch[0]) * (1e30 if len(steps) > 4 else 1.0)).square().mean()

    return Trainer(settings, TrainingTask(model, data, loss), alone())


INFINITE = ["--precision.dtype", "float32", "--data.validation_every", "0"]


def test_an_infinite_loss_stops_the_run_before_the_step(tmp_path):
    trainer = overflowing(config(tmp_path, *INFINITE))
    with pytest.raises(NotFiniteError, match=r"step 5 has a loss of inf and .*optimizer.lr"):
        trainer.train()
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert [*map(step_of, find_checkpoints(tmp_path / "checkpoints", "auto"))] == [3]


def test_an_infinite_norm_between_records_stops_a_run_that_clips(tmp_path):
    options = ["--run.log_every", "1000", "--checkpoint.every", "1000"]
    with pytest.raises(NotFiniteError, match="step 5 has"):
        overflowing(config(tmp_path, *INFINITE, *options)).train()
    options += ["--optimizer.clip_norm", "0"]  # then the last checkpoint shows it
    with pytest.raises(NotFiniteError, match="after step 7 trained parameters are|step 7 has"):
        overflowing(config(tmp_path / "other", *INFINITE, *options)).train()
    assert not find_checkpoints(tmp_path / "other" / "checkpoints", "auto")


def test_with_nonfinite_warn_the_last_finite_checkpoint_stays(tmp_path, caplog, capsys):
    options = ["--run.nonfinite", "warn", "--checkpoint.every", "1", "--checkpoint.keep", "1"]
    overflowing(config(tmp_path, *INFINITE, *options)).train()
    assert records(tmp_path)[4]["loss"] is None
    assert "step 5 has a loss of inf" in caplog.text
    assert [*map(step_of, find_checkpoints(tmp_path / "checkpoints", "auto"))] == [STEPS, 4]
    show_list(str(tmp_path))
    newest, before = capsys.readouterr().out.splitlines()[-2:]
    assert newest.endswith("complete, but with numbers that are not finite")
    assert before.endswith("complete")
    # Also by a process that has not written it, and while nothing finite follows.
    overflowing(config(tmp_path, *INFINITE, *options, "--run.steps", "9")).train()
    assert [*map(step_of, find_checkpoints(tmp_path / "checkpoints", "auto"))] == [9, 4]


@pytest.mark.mpi
def test_all_ranks_stop_at_an_infinite_loss(job, together):
    with pytest.raises(NotFiniteError, match="a loss of (inf|nan)"):
        make(
            config(together / "run", "--optimizer.lr", "1e300", "--optimizer.name", "sgd"), job
        ).train()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--checkpoint.every", "3", "--data.validation_every", "3"], ""),
        (["--checkpoint.every", "3", "--data.validation_every", "1"], ""),
        (["--checkpoint.every", "0", "--checkpoint.minutes", "1"], ""),
        (["--checkpoint.every", "3", "--data.validation_every", "4"], r"set data\."),
        (["--checkpoint.every", "3", "--data.validation_every", "0"], r"set data\."),
        (["--checkpoint.every", "0"], r"set data\."),
        (["--run.steps", "2"], "that of step 3, and the last step is 2: train for more steps"),
    ],
)
def test_keep_best_needs_a_validation_before_each_checkpoint(tmp_path, options, told):
    settings = config(tmp_path, "--checkpoint.keep_best", "2", *options)
    if not told:
        make(settings, alone())
        return
    with pytest.raises(ConfigError, match=rf"keep_best is 2, but .*{told}"):
        make(settings, alone())


@pytest.mark.ranks(1, 2)
def test_a_buffer_made_by_expand_is_sent_saved_and_restored_and_a_sparse_one_is_not(
    group, together
):
    def end(steps: int) -> torch.nn.Module:
        model = torch.nn.Linear(4, 1)
        mask = torch.full((1, 4), float(steps + group.rank))  # the first run's, of rank 0
        model.register_buffer("mask", mask.expand(8, 4))
        own = (torch.eye(3) * group.rank).to_sparse()
        model.register_buffer("own", own, persistent=False)
        task = TrainingTask(
            model, TensorDataset(torch.ones(8, 4)), lambda m, batch: m(batch[0] * m.mask[0]).mean()
        )
        options = ["--run.dir", f"{together}", "--run.steps", f"{steps}", "--data.batch", "4"]
        settings = load(None, [*options, "--run.preflight", "false"])
        with Trainer(settings, task, Runtime(group, group)) as trainer:
            trainer.train()
        return trainer.model

    end(2)
    model = end(4)
    assert torch.equal(model.mask, torch.full((8, 4), 2.0))
    assert torch.equal(model.own.to_dense(), torch.eye(3) * group.rank)
