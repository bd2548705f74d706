"""Performance tests measure steps, and leave nothing behind but the result."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_train.config.file import load
from hpc_train.errors import ConfigError, Stopped
from hpc_train.models import GPT
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

STEPS = 8


def trainer(directory, started, *options, finish=None) -> Trainer:
    fixed = ["--run.dir", directory, "--run.epochs", 9, "--run.performance_test", STEPS]
    fixed += ["--data.batch", 12, "--data.validation_every", 2, "--checkpoint.every", 2]
    fixed += ["--run.preflight", "false", "--run.patience", 2, "--checkpoint.keep_best", 1]
    settings = load(None, [str(word) for word in (*fixed, *options)])
    tokens = torch.randint(13, (60, 9), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    torch.manual_seed(0)
    model = GPT(vocab=13, sequence=8, layers=1, hidden=8, heads=2)
    task = TrainingTask(
        model,
        data,
        lambda gpt, batch: gpt(*batch),
        validation=data,
        tokens_per_sample=8,
        finish=finish,
    )
    return Trainer(settings, task, started)


def alone():
    return Runtime(Group(), Group())


@pytest.mark.ranks(1, 2, 4)
def test_a_test_measures_each_step_and_neither_saves_nor_validates(group, together):
    called = []
    with trainer(together / "run", Runtime(group, group), finish=called.append) as made:
        made.train()
    result = json.loads((together / "run/performance.json").read_text())
    records = [json.loads(x) for x in (together / "run/metrics.jsonl").read_text().splitlines()]
    assert not called
    assert not list((together / "run/checkpoints").iterdir())
    assert records[-1]["step"] == STEPS
    assert not any("validation_loss" in record for record in records)
    seconds = result["seconds"]
    assert all(len(values) == STEPS for values in seconds.values())
    for i, step in enumerate(seconds["step"]):
        assert 0 < sum(seconds[phase][i] for phase in seconds if phase != "step") <= 1.001 * step
    assert result["warmup"] == 2
    assert result["step_seconds"] == pytest.approx(
        float(torch.tensor(seconds["step"][2:]).quantile(0.5))
    )
    assert result["samples_per_second"] == pytest.approx(12 / result["step_seconds"])
    assert result["tokens_per_second"] == pytest.approx(96 / result["step_seconds"])
    assert (result["ranks"], result["batch"]) == (group.size, 12)
    assert result["layout"] == {"dp": group.size, "tp": 1, "pp": 1}
    low, high = result["step_seconds_quartiles"]
    assert low <= result["step_seconds"] <= high


def test_the_run_directory_of_a_training_is_refused(tmp_path):
    with trainer(tmp_path, alone(), "--run.performance_test", "false", "--run.patience", 0) as made:
        made.train()
    before = (tmp_path / "metrics.jsonl").read_text()
    with trainer(tmp_path, alone()) as made, pytest.raises(ConfigError, match="of its own"):
        made.train()
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_test_that_is_stopped_leaves_no_result_and_can_start_again(tmp_path):
    with trainer(tmp_path, alone()) as made:
        made.train()

        def stop(step):
            if step.number == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return counted(step)

        made = trainer(tmp_path, alone())
        counted = made.assembly.substituted.count
        made.assembly.substituted.count = stop
        with pytest.raises(Stopped) as stopped:
            made.train()
    assert str(stopped.value).startswith("stopped by SIGTERM after step")
    assert "checkpoint" not in str(stopped.value)
    assert not (tmp_path / "performance.json").exists()
    with trainer(tmp_path, alone()) as made:
        made.train()
    steps = [json.loads(x)["step"] for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)), "it has begun again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run.performance_test", "1"], "2 or more steps"),
        (["--run.performance_test", "true", "--checkpoint.resume", "x"], "leave one of them out"),
    ],
)
def test_mistakes_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load(None, options)


def test_true_takes_as_many_steps_as_the_help_says():
    assert load(None, ["--run.performance_test", "true"]).run.test_steps == 40
