"""A run says which rank is slow and what was communicated."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_train.job import slow_ranks
from hpc_train.monitoring.device_seconds import DeviceSeconds
from hpc_train.monitoring.records import TRAINER_KEYS
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import step_records
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import config

STEPS = 18


class Late(TensorDataset):
    """Samples that one rank gets late."""

    seconds = 0.0

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


def read(directory, name):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def bytes_of(communication):
    return sum(one["bytes"] for one in communication["operations"])


@pytest.mark.ranks(4, later=(2,))
def test_events_and_records_name_a_slow_rank_and_say_what_was_communicated(
    group, together, monkeypatch
):
    monkeypatch.setattr(slow_ranks, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(slow_ranks, "COST", 0)
    monkeypatch.setattr(step_records, "COMMUNICATION_SECONDS", (0.0, 0.0))
    last = group.size - 1
    data = Late(torch.ones(64, 8).double(), torch.ones(64, 1).double())
    data.seconds = 0.01 if group.rank == last else 0.0
    task = TrainingTask(torch.nn.Linear(8, 1), data, lambda m, b: (m(b[0]) - b[1]).square().mean())
    options = ["--data.validation_every", "0", "--run.steps", str(STEPS)]
    options += ["--run.preflight", "true", "--data.batch", str(4 * group.size)]
    options += ["--data.prefetch", "0", "--memory.zero", "0"]
    settings = config(together / "run", *options)
    with Trainer(settings, task, Runtime(group, group)) as trainer:
        trainer.train()
    if group.rank:
        return
    events = read(together / "run", "events.jsonl")
    start, *between, communication, end = events
    slow = [one for one in between if one["event"] == "slow"]
    earlier = [one for one in between if one["event"] == "communication"]
    assert (start["event"], start["steps"]) == ("start", STEPS)
    assert start["link_inside"] > 0
    assert "link_across" not in start
    assert [(one["event"], one["rank"], one["cause"]) for one in slow] == [("slow", last, "data")]
    assert slow[0]["host"] == start["hosts"][0]
    assert communication["event"] == "communication"
    assert communication["step"] == end["step"] == STEPS
    assert earlier, "a job that is killed has no last one"
    operations = communication["operations"]
    assert 0 < bytes_of(earlier[0]) < bytes_of(communication)
    sums = [one for one in operations if one["name"] == "gradient sums inside nodes"]
    assert sum(one["bytes"] for one in sums) > 0
    assert all(one["limit"] == start["link_inside"] for one in operations)
    record = read(together / "run", "metrics.jsonl")[-1]
    assert record["slow_rank"] == last
    assert record.keys() <= TRAINER_KEYS
    assert 0.02 < record["slow_seconds"] <= record["step_seconds"]


class Event:
    """An event of a GPU, as torch has them, that is reached after a time."""

    now = 0.0

    def record(self):
        self.at = Event.now

    def query(self):
        return self.at < 10

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_the_time_of_a_gpu_is_that_between_its_events():
    device = DeviceSeconds(Event)
    for seconds in (1.0, 3.0, 20.0):  # the last one has not ended
        with device:
            Event.now += seconds
    assert device.take() == pytest.approx(2.0)
    assert device.take() == 0.0
    assert DeviceSeconds.of(torch.device("cpu")) is None
