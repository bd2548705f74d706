"""Trackers of a job that are slow, blocked or broken."""

from __future__ import annotations

import json
import re
import sys
import threading
import types

import pytest

from hpc_train.trackers import feed, thread
from hpc_train.trackers.source import TrackedRun
from tests.trackers.runs import MadeRun
from tests.waiting import wait_until


class Own:
    """A tracker as a user writes it."""

    made: list[Own] = []  # noqa: RUF012
    fails = blocks = None

    def __init__(self, directory, config, after) -> None:
        self.config, self.after, self.steps, self.closed = config, after, [], False
        Own.made.append(self)

    def log(self, record):
        if self.blocks is not None:
            self.blocks.wait()
        if self.fails is not None and record["step"] >= self.fails:
            raise RuntimeError("no route to the tracker")
        self.steps.append(record["step"])

    def close(self):
        self.closed = True


@pytest.fixture
def own(monkeypatch):
    module = types.ModuleType("own_trackers")
    module.Own = Own
    monkeypatch.setitem(sys.modules, "own_trackers", module)
    monkeypatch.setattr(Own, "made", [])
    monkeypatch.setattr(thread, "ROUND_SECONDS", 0.0)
    return "own_trackers:Own"


class Job:
    """A job that logs to trackers."""

    def __init__(self, path, names) -> None:
        self.run = MadeRun(path)
        self.run.job(0, 0)
        self.file = (path / "metrics.jsonl").open("a")
        self.trackers = thread.Trackers(TrackedRun(path, path), names, lambda: True)

    def log(self, first, last):
        for step in range(first, last + 1):
            self.file.write(json.dumps(self.run.record(step)) + "\n")
            self.file.flush()
            self.trackers.listen({"step": step})

    def end(self):
        self.trackers.close()
        self.file.close()


def test_a_class_of_the_user_gets_all_records_in_order(tmp_path, own):
    job = Job(tmp_path / "run", [own])
    job.log(1, 20)
    job.end()
    (tracker,) = Own.made
    assert (tracker.after, tracker.steps, tracker.closed) == (0, [*range(1, 21)], True)
    assert tracker.config["optimizer"]["lr"] == 0.5


def test_a_tracker_that_raises_costs_one_warning_and_no_record(tmp_path, own, monkeypatch, caplog):
    monkeypatch.setattr(thread, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(Own, "fails", 3)
    job = Job(tmp_path / "run", [own, "csv"])
    job.log(1, 5)
    job.end()
    assert caplog.text.count("fails (RuntimeError: no route to the tracker)") == 1
    assert "own_trackers:Own lacks the last" in caplog.text
    assert all(tracker.closed for tracker in Own.made)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 6
    monkeypatch.setattr(Own, "fails", None)
    again = thread.Trackers(TrackedRun(tmp_path / "run", tmp_path / "run"), [own], lambda: True)
    again.close()
    assert Own.made[-1].steps == [*range(Own.made[-1].after + 1, 6)]
    assert Own.made[-1].after <= 2


def test_a_tracker_that_blocks_delays_neither_training_nor_its_end(
    tmp_path, own, monkeypatch, caplog
):
    monkeypatch.setattr(thread, "LAST_SECONDS", 0.2)
    monkeypatch.setattr(thread, "LATE", 5)
    gate = threading.Event()
    monkeypatch.setattr(Own, "blocks", gate)
    job = Job(tmp_path / "run", [own, "csv"])
    job.log(1, 50)  # hangs if it waits for the tracker
    job.end()
    assert caplog.text.count("own_trackers:Own has not taken 5 records yet") == 1
    assert "own_trackers:Own lacks the last 50 records" in caplog.text
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 51
    gate.set()
    for one in job.trackers.threads:
        one._thread.join(10)


def test_a_slow_tracker_that_fails_then_says_why_and_what_it_really_lacks(
    tmp_path, own, monkeypatch, caplog
):
    monkeypatch.setattr(thread, "LATE", 2)
    monkeypatch.setattr(feed, "READ_BYTES", 200)
    gate = threading.Event()
    monkeypatch.setattr(Own, "blocks", gate)
    monkeypatch.setattr(Own, "fails", 15)
    job = Job(tmp_path / "run", [own])
    job.log(1, 20)
    gate.set()
    job.end()
    assert "own_trackers:Own has not taken 2 records yet" in caplog.text
    assert "own_trackers:Own fails (RuntimeError: no route to the tracker)" in caplog.text
    lacks = re.search(r"own_trackers:Own lacks the last (\d+) records", caplog.text)
    assert 6 <= int(lacks[1]) < 10  # those since the last mark


def test_a_tracker_that_fails_again_is_told_again(tmp_path, own, monkeypatch, caplog):
    monkeypatch.setattr(thread, "RETRY_SECONDS", 0.0)
    job = Job(tmp_path / "run", [own])
    (one,) = job.trackers.threads
    for step in range(1, 5):
        monkeypatch.setattr(Own, "fails", step if step % 2 else None)
        job.log(step, step)
        wait_until(lambda fails=bool(step % 2): one._failing == fails, 20)
    job.end()
    assert caplog.text.count("fails (RuntimeError") == 2


def test_a_job_that_lost_the_directory_writes_there_no_more(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.job(0, 5)
    trackers = thread.Trackers(TrackedRun(run.path, run.path), ["csv"], lambda: False)
    trackers.listen({"step": 5})
    trackers.close()
    assert not (run.path / "metrics.csv").exists()
