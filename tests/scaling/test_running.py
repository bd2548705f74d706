"""The wait for runs in the queue."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_train.errors import HpcTrainError
from hpc_train.launch.request import SubmitRequest
from hpc_train.scaling import running
from hpc_train.scaling.running import QueuedRuns
from hpc_train.scaling.study import ScaleRun
from tests.waiting import Clock


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
