"""The wait for runs in the queue."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from hpc_train.errors import HpcTrainError
from hpc_train.launch.request import SubmitRequest
from hpc_train.scaling import running
from hpc_train.scaling.running import QueuedRuns, run_here
from hpc_train.scaling.study import ScaleRun
from tests.waiting import Clock, wait_until


@pytest.fixture
def wait(monkeypatch, tmp_path):
    """Wait for a run. Each look at the queue shows its jobs, none, or an error."""
    monkeypatch.setattr(running, "time", Clock())
    monkeypatch.setattr(running, "submit", lambda request: SimpleNamespace(ids=["7"]))
    run = ScaleRun(1, 1, tmp_path / "run", [])

    def waited(*looks):
        left, events = list(looks), []

        def look(_):
            if not left:
                events.append({"event": "ended", "next": ""})
                return "slurm", ["7"]
            if left[0] is HpcTrainError:
                raise left.pop(0)("squeue does not answer")
            return "slurm", left.pop(0)

        monkeypatch.setattr(running, "still_queued", look)
        monkeypatch.setattr(running, "read_events", lambda _: events)
        study = SimpleNamespace(result=lambda _: SimpleNamespace(median=1.0) if events else None)
        request = SubmitRequest(config=Path("my.yaml"))
        return QueuedRuns(study, request, 0, lambda _: None).submit([run], wait=True) == [run]

    return waited


def test_a_run_that_the_queue_does_not_show_for_a_moment_is_waited_for(wait):
    assert not wait(["7"], [], ["7"], ["7"])
    assert not wait([], HpcTrainError, ["7"], [], ["7"])


def test_a_run_that_has_left_the_queue_without_a_record_has_failed(wait):
    assert wait(["7"], [], [])


LAUNCH = """#!/bin/sh
trap 'exit 75' TERM
touch ready
for _ in $(seq 100); do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_that_is_started_here(monkeypatch, tmp_path, number):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch").write_text(LAUNCH)
    (tmp_path / "launch").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "launch"))

    def send():
        wait_until((tmp_path / "ready").exists)
        os.kill(os.getpid(), number)

    study = SimpleNamespace(nodes=[1], ranks_per_node=1, result=lambda _: None)
    run = ScaleRun(1, 1, tmp_path / "run", [])
    before = signal.signal(number, lambda *_: None)
    sender = Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_here(study, SubmitRequest(config="my.yaml"), [run], lambda _: None)
    finally:
        sender.join()
        signal.signal(number, before)
