"""A real SLURM ends, requeues and preempts jobs: each is in the queue once afterwards, or gone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from hpc_train.launch.batch import text
from hpc_train.launch.resources import Resources
from tests.cluster.hosts import hosts
from tests.cluster.slurm import CONFIGURATION, Slurm, slurm
from tests.launch.job_shell import PLAIN, SAVES
from tests.waiting import wait_until

PREEMPTION = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime=8
PartitionName=high Nodes=ALL PriorityTier=9
"""
MODES = ["requeue", "submit"]
SETTLED = 12  # seconds; a requeued job waits 5 to 7 for its next start


@pytest.fixture(scope="module")
def up() -> Iterator[Slurm]:
    with pytest.MonkeyPatch.context() as patch, hosts(3, 2) as cluster:
        patch.setattr("tests.cluster.slurm.CONFIGURATION", CONFIGURATION + PREEMPTION)
        with slurm(cluster) as started:
            yield started


@pytest.fixture(autouse=True)
def queue_left_empty(up):
    """A job that a failed test has left would take the next one's slots."""
    yield
    up.run(["scancel", "--user", "root"])
    wait_until(lambda: not up.run(["squeue", "--noheader"]).stdout)


class Job(NamedTuple):
    """A job that runs the script of `submit`, with a program that saves when it is asked to."""

    up: Slurm
    run_dir: Path
    number: int

    @property
    def output(self) -> str:
        """What it and those that went on have printed."""
        return "".join(path.read_text() for path in self.run_dir.glob("*.out"))

    @property
    def records(self) -> list[dict]:
        """The lines of jobs.jsonl."""
        lines = (self.run_dir / "jobs.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def queued(self) -> list[str]:
        """Jobs of this name in the queue: number, state, reason."""
        words = ["squeue", "--noheader", "--name", self.run_dir.name, "--format=%i %T %r"]
        return self.up.run(words).stdout.splitlines()

    def call(self, *words: str) -> None:
        self.up.run([*words, str(self.number)]).check_returncode()

    def started(self, count: int) -> bool:
        return self.output.count("ready\n") == count

    def cancel(self) -> None:
        """Leave nothing for the next test."""
        self.up.run(["scancel", "--name", self.run_dir.name])
        wait_until(lambda: not self.queued)


def submitted(up: Slurm, run_dir: Path, mode: str, *options: str, seconds: float = 1) -> Job:
    """Submit a job and wait until its program runs."""
    run_dir.mkdir()
    script = run_dir / "job.sh"
    batch = replace(
        PLAIN,
        name=run_dir.name,
        resources=Resources(1, 1, 1, 300),
        run_dir=str(run_dir),
        script=str(script),
        launcher=["bash", "-c", SAVES.format(seconds=seconds).replace("run/", f"{run_dir}/")],
        setup=[],
        requeue_by=mode,
    )
    script.write_text(text(batch))
    job = Job(up, run_dir, up.submit(script, *options))
    wait_until(lambda: job.started(1))
    return job


def in_each_mode(up: Slurm, folder: Path, *call: str) -> dict[str, Job]:
    """A job of each mode to which the same has happened, side by side, as each has to wait."""
    jobs = {mode: submitted(up, folder / f"{call[-1].strip('-')}-{mode}", mode) for mode in MODES}
    for job in jobs.values():
        job.call(*call)
    return jobs


def test_a_cancelled_job_does_not_come_back(up, tmp_path):
    jobs = in_each_mode(up, tmp_path, "scancel").values()
    assert [up.wait(job.number) for job in jobs] == ["CANCELLED"] * 2
    time.sleep(SETTLED)
    for job in jobs:
        assert not job.queued
        assert up.job(job.number)["Restarts"] == "0"
        assert "saved" in job.output
        assert job.records[-1]["why"] == "the job was cancelled"
        assert job.records[-1]["continue"] in job.output


def test_a_requeued_job_is_one_job(up, tmp_path):
    for job in in_each_mode(up, tmp_path, "scontrol", "requeue").values():
        wait_until(lambda job=job: job.started(2))
        assert job.queued == [f"{job.number} RUNNING None"]
        assert up.job(job.number)["Restarts"] == "1"
        assert job.records[-1]["why"] == "SLURM has queued the job again"


def test_usr1_queues_a_job_again_once(up, tmp_path):
    jobs = in_each_mode(up, tmp_path, "scancel", "--batch", "--signal=USR1")
    for mode, job in jobs.items():
        wait_until(lambda job=job: job.started(2))
        assert len(job.queued) == 1
        assert job.records[0]["next"] == job.queued[0].split()[0]
        assert up.state(job.number) == {"requeue": "RUNNING", "submit": "COMPLETED"}[mode]


@pytest.mark.long
@pytest.mark.parametrize("partition", ["batch", "grace"])
def test_a_preempted_job_comes_back_once(up, tmp_path, partition):
    job = submitted(up, tmp_path / f"preempted-{partition}", "submit", "--partition", partition)
    other = tmp_path / "other.sh"
    other.write_text("#!/bin/bash\nsleep 1\n")
    number = up.submit(other, "--partition=high", "--nodes=3", "--exclusive")
    assert up.wait(number) == "COMPLETED"
    wait_until(lambda: job.started(2))
    assert job.queued == [f"{job.number} RUNNING None"]
    assert up.job(job.number)["Restarts"] == "1"


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_sigterm_at_the_time_limit_queues_a_job_again_once(up, tmp_path, mode):
    job = submitted(up, tmp_path / f"limited-{mode}", mode)
    up.end_in(job.number, 2)
    wait_until(lambda: job.started(2))
    assert len(job.queued) == 1


@pytest.mark.slow("SLURM has to notice that a host is gone")
def test_a_job_that_loses_a_node_comes_back_once(up, tmp_path):
    """It is not started by `hpc-train launch`, so SLURM does not keep it."""
    job = submitted(up, tmp_path / "lost", "submit", "--nodes=2")
    up.power_off("node2")
    try:
        wait_until(lambda: job.started(2))
        assert job.queued == [f"{job.number} RUNNING None"]
    finally:
        up.boot("node2")
    wait_until(lambda: up.nodes()["node2"] == "idle")


EVENTS = {
    "usr1": ("scancel", "--batch", "--signal=USR1"),
    "term": ("scancel", "--batch", "--signal=TERM"),
    "hold": ("scontrol", "hold"),
}
# After one of these scancel would signal the next start.
LAST = {"cancel": ("scancel",), "requeue": ("scontrol", "requeue")}


def expected(events: list[str]) -> int:
    """How many jobs are left of one to which these happened while it saved."""
    if "cancel" in events:
        return 0
    return int("requeue" in events or "term" not in events)


@pytest.mark.long
def test_after_any_mixture_of_events_there_is_one_job_or_none(up, tmp_path):
    wrong = []
    for begin in range(0, 20, 5):  # as many as there are slots for
        jobs = []
        for seed in range(begin, begin + 5):
            choose = random.Random(seed)
            events = choose.sample(sorted(EVENTS), choose.randint(1, 2))
            events += choose.sample(sorted(LAST), choose.randint(0, 1))
            mode = choose.choice(MODES)
            job = submitted(up, tmp_path / f"mixture-{seed}", mode, seconds=2)
            for event in events:
                up.run([*(EVENTS | LAST)[event], str(job.number)])
            jobs.append((job, events, mode))
        time.sleep(SETTLED)
        for job, events, mode in jobs:
            print(mode, *events, job.queued)
            if len(job.queued) != expected(events):
                wrong.append((mode, events, job.queued, job.output))
            job.cancel()
    assert not wrong
