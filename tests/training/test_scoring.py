"""Scores of held-out samples of a user's own task: every sample once, in order, on any layout."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.errors import UserError
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.scoring import HeldOutScores, as_numbers
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import config, records

HELD_OUT = 23


class Numbered(nn.Module):
    """Two stages. It learns a line."""

    stages = ("first", "last")

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def numbers(count):
    values = torch.arange(count, dtype=torch.float64)[:, None]
    return TensorDataset(values, 2 * values)


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0] / 64), batch[1] / 64)


def measure(model, batch):
    assert not model.training
    return loss(model, batch), {"number": batch[0][:, 0], "bfloat16": batch[1].bfloat16()}


def compute(arrays):
    """A score that shows which samples there are, in which order."""
    seen = arrays["number"]
    return {
        "samples": len(seen),
        "in_order": float((np.diff(seen) > 0).all()),
        "sum": seen.sum(),
        "rows": arrays["bfloat16"].size,
        "undefined": None,
        "not_a_number": float("nan"),
    }


def make(settings, started, given=HeldOutScores(measure, compute)) -> Trainer:  # noqa: B008
    torch.manual_seed(5)
    held_out = numbers(HELD_OUT)
    more = {"validation": held_out, "scores": given, "private_parameters": True}
    task = TrainingTask(Numbered(), numbers(60), loss, **more)
    return Trainer(settings, task, started)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--data.micro_batch", "2"],
        ["--data.micro_batch", "2", "--memory.zero", "3"],
        ["--parallel.pp", "2", "--data.micro_batch", "3"],
    ],
    ids=["whole", "micro-batches", "zero-3", "pipeline"],
)
def test_every_held_out_sample_counts_once_and_in_order(group, together, options, caplog):
    if "--parallel.pp" in options and group.size % 2:
        return
    with caplog.at_level(logging.INFO):
        make(config(together / "run", *options), Runtime(group, group)).train()
    told = [r.message for r in caplog.records if r.message.startswith("held-out samples")]
    assert len(told) == 1
    assert "samples 23, in order 1, sum 253, rows 23, not a number nan" in told[0]
    if group.rank == 0:
        last = records(together / "run")[-1]
        found = {key: value for key, value in last.items() if key.startswith("validation_")}
        assert found.pop("validation_loss") > 0
        assert found == {
            "validation_samples": 23,
            "validation_in_order": 1,
            "validation_sum": 253,
            "validation_rows": 23,
            "validation_not_a_number": None,
        }
        text = (together / "run" / "metrics.jsonl").read_text()
        assert json.loads(text.splitlines()[0]).keys().isdisjoint(found)


class Viewed(Numbered):
    """Its last stage returns a view of what it received."""

    stages = ("first", "middle", "last", "view")

    def __init__(self):
        super().__init__()
        self.middle, self.view = nn.Linear(4, 4), nn.Flatten(0)

    def forward(self, x):
        return self.view(self.last(self.middle(self.first(x))))


@pytest.mark.ranks(1, 4)
def test_rows_may_be_views_of_what_the_last_stage_received(group, together):
    def squared(model, batch):
        found = model(batch[0] / 64)
        return (found - batch[1][:, 0] / 64).square().mean(), {"found": found, "wanted": batch[1]}

    def mean(arrays):
        return {"error": np.square(arrays["found"] - arrays["wanted"][:, 0] / 64).mean()}

    torch.manual_seed(5)
    task = TrainingTask(
        Viewed(),
        numbers(60),
        lambda model, batch: squared(model, batch)[0],
        validation=numbers(HELD_OUT),
        scores=HeldOutScores(squared, mean),
    )
    options = ["--parallel.pp", str(group.size), "--data.micro_batch", "2"]
    with Trainer(config(together / "run", *options), task, Runtime(group, group)) as trainer:
        trainer.validate()
        assert trainer.held_out["error"] == pytest.approx(trainer.held_out["loss"], rel=1e-12)


class Vocabulary(nn.Module):
    """Tensor-parallel ranks have a part of its outputs each."""

    tensor_plan = {"head": "vocab", "loss": "vocab"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(1, 4), nn.Linear(4, 6)
        self.loss = nn.CrossEntropyLoss(reduction="none")

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["scores", "classes"])
def test_rows_of_a_part_of_the_vocabulary_are_refused(group, together, kind):
    def classified(model, batch):
        found = model(batch[0] / 64)
        rows = found if kind == "scores" else found.argmax(-1)
        large = {"number": 1e6 * batch[0]}
        return model.loss(found, (batch[1][:, 0] % 6).long()).mean(), {"rows": rows, **large}

    task = TrainingTask(
        Vocabulary(),
        numbers(60),
        lambda model, batch: classified(model, batch)[0],
        validation=numbers(HELD_OUT),
        scores=HeldOutScores(classified, lambda arrays: {}),
    )
    settings = config(together / "run", "--parallel.tp", "2")
    with (
        Trainer(settings, task, Runtime(group, group)) as trainer,
        pytest.raises(UserError, match="rows that `measure` .* differ .* parallel.tp"),
    ):
        trainer.validate()


@pytest.mark.ranks(1, 4)
def test_a_limited_pass_scores_the_same_samples(group, together):
    options = ["--data.batch", "12", "--data.validation_batches", "1"]
    trainer = make(config(together / "run", *options), Runtime(group, group))
    trainer.validate()
    assert trainer.held_out["sum"] == sum(place * 23 // 12 for place in range(12))


@pytest.mark.ranks(1, 4)
def test_wrong_rows_are_refused_on_all_ranks(group, together):
    def wrong(model, batch):
        return loss(model, batch), {"mean": batch[0].mean()}

    scores = HeldOutScores(wrong, compute)
    trainer = make(config(together / "run"), Runtime(group, group), scores)
    with pytest.raises(UserError, match=r"returned \[\] for 'mean'"):
        trainer.train()


@pytest.mark.ranks(1, 4)
def test_scores_that_cannot_be_computed_fail_on_all_ranks(group, together):
    scores = HeldOutScores(measure, lambda arrays: {"missing": arrays["missing"]})
    trainer = make(config(together / "run"), Runtime(group, group), scores)
    with pytest.raises(Exception, match="missing"):
        trainer.train()


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize(
    ("computed", "line"),
    [
        (None, "returned a value of type NoneType: let it return a dict of numbers by name"),
        ({"auc": np.ones(2)}, "returned a value of type ndarray for 'auc', which is no number"),
        ({"auc": torch.ones(2)}, "returned a value of type Tensor for 'auc'"),
        ({"auc": "high"}, "returned a value of type str for 'auc'"),
        ({"loss": 5.0}, "a score of the task has the name 'loss'"),
    ],
    ids=["none", "array", "tensor", "text", "loss"],
)
def test_wrong_scores_are_refused_on_all_ranks(group, together, computed, line):
    scores = HeldOutScores(measure, lambda arrays: computed)
    with (
        make(config(together / "run"), Runtime(group, group), scores) as trainer,
        pytest.raises(UserError, match=line),
    ):
        trainer.validate()


def test_scores_may_be_numbers_of_numpy_and_torch():
    given = {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": np.array([3]), "d": True}
    assert as_numbers(given) == {"a": 0.5, "b": 2.0, "c": 3.0, "d": 1.0}
