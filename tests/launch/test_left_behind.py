"""Ranks under srun that wait for a dead one."""

from __future__ import annotations

import pytest

from hpc_train.launch import left_behind
from hpc_train.launch.left_behind import LeftBehind, step_name


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What SLURM was asked; it knows a step of ours and one of somebody else's."""
    steps = f"7.1 {step_name()}\\n7.2 other\\n7.batch batch\\n"
    for name, answer in (("squeue", steps), ("scancel", "")):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho {name} $* >> {tmp_path}/calls\nprintf '{answer}'\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path / "calls"


def test_our_step_is_ended_and_no_other(calls, monkeypatch):
    left = LeftBehind()
    left.end()
    left.hear("srun: error: node3: task 4: Killed\n")  # by us
    monkeypatch.setattr(left_behind.time, "monotonic", lambda: float("inf"))
    assert not left.due
    assert "--jobs 7" in calls.read_text()
    assert calls.read_text().splitlines()[1:] == ["scancel --signal=KILL 7.1"]


@pytest.mark.parametrize(
    ("line", "soon", "later"),
    [
        ("srun: error: node3: task 5: Killed\n", True, True),
        ("srun: error: node3: tasks 4-5: Segmentation fault\n", True, True),
        ("srun: error: node3: task 5: Exited with exit code 1\n", False, True),
        ("srun: error: node3: task 5: Exited with exit code 75\n", False, False),
        ("step 5  loss 2.0\n", False, False),
    ],
)
def test_ranks_that_have_stopped_in_order_are_left(monkeypatch, line, soon, later):
    now = [100.0]
    monkeypatch.setattr(left_behind.time, "monotonic", lambda: now[0])
    left = LeftBehind()
    left.hear(line)
    assert not left.due
    for seconds, expected in ((1, soon), (10, later)):
        now[0] = 100.0 + seconds
        assert left.due == expected
