from __future__ import annotations

import time

import psutil
import pytest

from hpc_train.host.process import RunningClock, StartUp, begun_ticks, seconds_since_begin


def test_a_process_knows_how_long_it_runs():
    began = psutil.Process().create_time()
    assert seconds_since_begin() == pytest.approx(time.time() - began, abs=2)


def test_nothing_is_assumed_where_linux_does_not_tell(tmp_path):
    assert seconds_since_begin(tmp_path) == 0
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_text("1 (a) b) S 1 2")
    assert seconds_since_begin(tmp_path) == 0


def test_a_process_that_nobody_has_waited_for_has_ended(tmp_path):
    for name, ticks in ("S", 8), ("Z", None), ("X", None):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_text(f"1 (a) b) {name} {'7 ' * 18} 8 9")
        assert begun_ticks(name, tmp_path) == ticks


def test_only_the_first_run_of_a_program_counts_its_start_up():
    start_up = StartUp(began=time.monotonic() - 100)
    assert start_up.take() == pytest.approx(time.monotonic() - 100, abs=1)
    assert start_up.take() == pytest.approx(time.monotonic(), abs=1)


def test_time_in_which_a_process_was_suspended_does_not_count(monkeypatch):
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = RunningClock(longest=2.0)
    for passed in 1.0, 100.0, 1.5:
        now[0] += passed
        clock.look()
    assert clock.seconds == 4.5
