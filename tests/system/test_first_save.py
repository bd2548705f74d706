"""Time for the first checkpoint is kept free, on a disk of which nobody knows how slow it is."""

from __future__ import annotations

import os
import signal
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_train.checkpoint import background, store
from hpc_train.checkpoint.catalogue import SAVE_SECONDS_FILE, find_checkpoints, step_of
from hpc_train.errors import ConfigError, Stopped
from hpc_train.job import heartbeat, preemption
from hpc_train.launch.protocol import RESTARTS
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import saving, steps
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from tests.checkpoint.faults import Call, Faults

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 10))]


class Clock(Faults):
    """Time that passes in steps and in saves only."""

    def __init__(self, monkeypatch, seconds_of_save: float) -> None:
        super().__init__(lambda *_: None, -1)
        self.now, self.save = 1e9, seconds_of_save
        read = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now)
        for module in (store, background, preemption, saving, steps, heartbeat):
            monkeypatch.setattr(module, "time", read)
        monkeypatch.setattr("hpc_train.files.call", self)

    def __call__(self, name: str, function: Call, *arguments: object) -> object:
        """A save reserves its space once."""
        if name == "reserve":
            self.now += self.save
        return super().__call__(name, function, *arguments)


class Job:
    """A loop of endless steps under a time limit."""

    def __init__(self, directory, clock: Clock, end: float, step: float, **options) -> None:
        self.clock, self.end, self.step = clock, clock.now + end, step
        model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runtime = Runtime(Group(), Group())
        self.loop = Loop(
            runtime, directory, model, self.optimizer, LoopOptions(every=1000, **options)
        )
        self.suspended = 0.0  # seconds of a suspension in the 20th step
        self.loop._stop_requests = lambda: preemption.StopRequests(end=self.end)  # type: ignore[method-assign]

    def train(self) -> int:
        """The last step, which a checkpoint has in time."""
        with pytest.raises(Stopped) as caught:
            for _, batches in self.loop.epochs(TensorDataset(torch.zeros(4)), batch=1, epochs=2000):
                for _ in batches:
                    self.clock.now += self.step
                    if self.suspended and self.loop.step_number == 20:
                        self.clock.now += self.suspended
                        os.kill(os.getpid(), signal.SIGCONT)
                    self.loop.step()
        assert self.clock.now <= self.end
        newest = step_of(find_checkpoints(self.loop.checkpoints.directory, "auto")[0])
        assert newest == caught.value.step
        return newest


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("background", [False, True])
def test_a_first_save_of_unknown_length_ends_before_the_limit(
    tmp_path, monkeypatch, seed, background
):
    draw = Random(seed)
    end = draw.uniform(60, 600)
    clock = Clock(monkeypatch, seconds_of_save=draw.uniform(0.01, 0.28) * end)
    job = Job(tmp_path, clock, end, step=draw.uniform(0.01, 0.1) * end, background=background)
    assert job.train() > 0


def test_a_save_that_takes_nearly_all_of_the_time_is_begun_early(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, seconds_of_save=80)
    assert Job(tmp_path, clock, end=100, step=1).train() == 10


@pytest.mark.parametrize("suspended", [0.0, 30.0])
def test_neither_the_first_save_nor_a_suspension_counts_as_a_step(tmp_path, monkeypatch, suspended):
    clock = Clock(monkeypatch, seconds_of_save=10)
    job = Job(tmp_path, clock, end=100, step=1)
    job.suspended = suspended
    job.train()
    began = clock.now - 10  # of the last save
    assert job.end - began < (1 + 2 * 10) + 1, "a step and two saves before the end, and no more"


def test_a_resumed_job_knows_what_a_save_took(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, seconds_of_save=10)
    first = Job(tmp_path, clock, end=100, step=1).train()
    assert float((tmp_path / SAVE_SECONDS_FILE).read_text()) == pytest.approx(10)
    # An attempt that begins shortly before the end of its job takes no step.
    monkeypatch.setenv(RESTARTS, "1")
    assert Job(tmp_path, clock, end=14, step=1).train() == first
    monkeypatch.delenv(RESTARTS)
    assert Job(tmp_path, clock, end=40, step=1).train() > first
    with pytest.raises(ConfigError, match="is over before the first step"):
        Job(tmp_path, clock, end=-1, step=1).train()


def test_one_slow_save_keeps_no_later_job_from_training(tmp_path, monkeypatch, caplog):
    clock = Clock(monkeypatch, seconds_of_save=1)
    first = Job(tmp_path, clock, end=20, step=1).train()
    (tmp_path / SAVE_SECONDS_FILE).write_text("1500\n")
    assert Job(tmp_path, clock, end=100, step=1).train() > first + 80
    assert "one took 1500 s in an earlier job" in caplog.text
    assert float((tmp_path / SAVE_SECONDS_FILE).read_text()) == pytest.approx(1)
    caplog.clear()
    Job(tmp_path, clock, end=20, step=1).train()
    assert "too short" not in caplog.text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_first_save_slower_than_in_the_attempt_before_is_in_time(tmp_path, monkeypatch, seed):
    draw = Random(seed)
    clock = Clock(monkeypatch, seconds_of_save=0.1)
    first = Job(tmp_path, clock, end=100, step=1).train()
    clock.save = draw.uniform(1, 40)
    assert Job(tmp_path, clock, end=100, step=1).train() > first


def test_without_a_time_limit_no_early_save_measures_the_cost(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, seconds_of_save=10)
    job = Job(tmp_path, clock, end=0, step=1)
    job.loop._stop_requests = lambda: preemption.StopRequests()  # type: ignore[method-assign]
    for _, batches in job.loop.epochs(TensorDataset(torch.zeros(4)), batch=1, epochs=5):
        for _ in batches:
            job.loop.step()
    assert [*map(step_of, find_checkpoints(tmp_path, "auto"))] == [20]


def test_a_failed_early_save_is_not_repeated_at_each_step(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, seconds_of_save=1)
    job = Job(tmp_path, clock, end=100, step=1)
    job.loop.saving.on_error = "warn"
    clock.fault, broken = lambda *_: None, []

    def fail(name: str, function: Call, *arguments: object) -> object:
        if name == "sync" and "reserve" in clock.names and clock.now < job.end - 20:
            broken.append(clock.now)
            raise OSError(5, "Input/output error")
        return clock(name, function, *arguments)

    monkeypatch.setattr("hpc_train.files.call", fail)
    job.train()
    assert len(broken) == 1
