"""The importance of features by permutation: what it says, and the same on all layouts."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch

from hpc_train.data.tables.features import (
    CategoricalFeature,
    NumericFeature,
    TableFeatures,
    TargetValues,
)
from hpc_train.data.tables.permuted import PermutedFeature
from hpc_train.errors import ConfigError, Stopped
from hpc_train.job import heartbeat
from hpc_train.launch.protocol import PROGRESS, read_progress
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.table_task import table_task
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import alone, config

FEATURES = TableFeatures(
    numeric=tuple(
        NumericFeature(name=name, column=name, edges=(-2.0, -0.7, 0.0, 0.7, 2.0)) for name in "ab"
    ),
    categorical=(CategoricalFeature(name="c", categories=("x", "y"), shares=(0, 0, 0.5, 0.5)),),
    target=TargetValues(task="regression", names=("y",)),
)


class Rows:
    """Rows whose target is the feature b alone."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.numeric = torch.randn(samples, 2, generator=generator, dtype=torch.float64)
        self.codes = torch.randint(2, 4, (samples, 1), generator=generator)

    def __len__(self):
        return len(self.numeric)

    def fetch(self, indices):
        numeric, codes = self.numeric[indices], self.codes[indices]
        return numeric, codes, numeric[:, 1].clone(), numeric.new_ones(len(codes))


def train(directory, started, *options, held_out=True):
    words = ["--model.kind", "tabular_resnet", "--model.hidden", "16", "--model.dropout", "0"]
    words += ["--run.steps", "60", "--data.importance", "2", *options]
    settings = config(directory, *words)
    rows = Rows(50, 1) if held_out else None
    task = table_task(settings, FEATURES, Rows(300, 0), rows, started.world)
    Trainer(settings, task, started).train()


def found(directory):
    return json.loads((directory / "importance.json").read_text())


def test_a_permuted_feature_keeps_its_values_and_the_others_their_rows():
    rows = Rows(40, 0)
    for place in range(3):
        permuted = PermutedFeature(rows, place, 5)
        before, after = rows.fetch(np.arange(40)), permuted.fetch(np.arange(40))
        features = [torch.cat([one[0], one[1].double()], 1) for one in (before, after)]
        same = (features[0] == features[1]).all(0).tolist()
        assert same == [other != place for other in range(3)]
        assert (features[0].sort(0).values == features[1].sort(0).values).all()
        assert (after[2] == before[2]).all()
        some = permuted.fetch([7, 3])
        assert (some[0] == after[0][[7, 3]]).all()  # whatever the batch is


def test_the_feature_that_decides_comes_first_and_the_others_have_no_effect(tmp_path):
    train(tmp_path, alone())
    features = found(tmp_path)["features"]
    assert next(iter(features)) == "b"
    assert features["b"]["loss"] > 0.5
    assert features["b"]["r2"] < -0.5
    assert max(abs(features[name]["loss"]) for name in "ac") < 0.1
    path = tmp_path / "importance.json"
    path.unlink()
    train(tmp_path, alone())  # the run has ended, and is asked again
    first = found(tmp_path)
    assert next(iter(first["features"])) == "b"
    train(tmp_path, alone(), "--run.steps", "70")  # and goes on
    assert found(tmp_path)["step"] == 70
    assert found(tmp_path)["held_out"] != first["held_out"]
    train(tmp_path, alone(), "--run.steps", "70", "--data.importance", "3")
    assert found(tmp_path)["repeats"] == 3


def test_a_run_that_patience_ends_has_importance_too(tmp_path):
    train(tmp_path, alone(), "--run.patience", "1", "--optimizer.lr", "1e-30")
    assert found(tmp_path)["step"] == 6, "the second validation was no better"
    assert len(found(tmp_path)["features"]) == 3


@pytest.mark.mpi
def test_a_stop_between_two_passes_keeps_the_features_and_progress_is_reported(
    job, together, monkeypatch
):
    told, due = together / "progress.json", []
    monkeypatch.setenv(PROGRESS, str(told))
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.0)
    pass_of = Trainer.scores_of

    def counted(trainer, rows):
        if job.world.rank == 0:
            due.append(read_progress(told, "-0").due)
            told.unlink()  # the next pass has to report anew
        if len(due) == 3 and job.world.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return pass_of(trainer, rows)

    monkeypatch.setattr(Trainer, "scores_of", counted)
    options = ["--run.steps", "5", "--run.hang_timeout", "900", "--checkpoint.every", "1"]
    stopped = None
    try:
        train(together / "run", job, *options)
    except Stopped as error:
        stopped = error
    assert str(stopped) == "stopped by SIGUSR1 after step 5, checkpoint written"
    early = found(together / "run")["features"]
    assert sorted(early) == ["a"]
    due.clear()
    train(together / "run", job, *options)
    after = found(together / "run")["features"]
    assert {name: after[name] for name in early} == early
    assert sorted(after) == ["a", "b", "c"]
    assert due == [1350.0] * (3 if job.world.rank == 0 else 0), "one pass of b, and two of c"


@pytest.mark.parametrize(
    "other", ['{"a": 3}', '{"a": {"loss": "1"}}', '{"a": {"loss": 1.0, "loss_std": "1"}}', "3"]
)
def test_an_odd_file_of_another_program_is_written_anew(tmp_path, other):
    train(tmp_path, alone(), "--run.steps", "1")
    wanted = (tmp_path / "importance.json").read_text()
    odd = f'{{"step": 1, "repeats": 2, "features": {other}, "begun": {other}}}'
    (tmp_path / "importance.json").write_text(odd)
    train(tmp_path, alone(), "--run.steps", "1")
    assert (tmp_path / "importance.json").read_text() == wanted


def test_a_finished_run_has_no_reason_to_stop(tmp_path):
    train(tmp_path, alone(), "--run.steps", "1")
    train(tmp_path, alone(), "--run.steps", "1", "--run.time_limit", "1")


@pytest.mark.mpi
def test_the_importance_is_that_of_one_rank(job, together):
    if job.world.rank == 0:
        train(together / "reference", Runtime(Group(), Group()), "--run.steps", "5")
    layouts = {"dp": [], "tp-pp": ["--parallel.tp", "2", "--parallel.pp", "2"]}
    for name, layout in layouts.items():
        train(together / name, job, "--run.steps", "5", *layout)
        if job.world.rank == 0:
            mine, wanted = (found(together / one)["features"] for one in (name, "reference"))
            for feature, values in wanted.items():
                assert mine[feature] == pytest.approx(values, rel=1e-8, abs=1e-10)


def test_importance_without_held_out_rows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no rows are held out"):
        train(tmp_path, alone(), "--data.validation_every", "0", held_out=False)
    with pytest.raises(ConfigError, match="does not learn the target"):
        train(tmp_path, alone(), "--model.pretraining", "masked_cells")
    with pytest.raises(ConfigError, match="model.kind is gpt"):
        config(tmp_path, "--data.importance", "1")
