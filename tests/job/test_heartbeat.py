"""How long a job may be silent, and what it tells its launcher."""

from __future__ import annotations

import math
import resource

import pytest

from hpc_train.job.heartbeat import HANG, LEARNING, Heartbeat, Pace, history
from hpc_train.launch import protocol
from hpc_train.mpi.group import Group

TIMEOUT = 1800.0


def paced(steps: int, seconds: float) -> Pace:
    """A pace that has seen steps, each fifth of which validates."""
    pace = Pace(steps, TIMEOUT, lambda step: step % 5 == 0)
    for step in range(1, 10):
        pace.took(step, 100 * seconds if step % 5 == 0 else seconds)
    return pace


def test_a_wait_within_a_step_is_measured_in_usual_steps():
    assert paced(20, 6.0).within(11) == 120
    assert paced(20, 0.1).within(11) == HANG, "not less"


def test_no_hang_limit_follows_from_steps_that_were_not_measured():
    pace = Pace(20, TIMEOUT)
    for step in range(1, LEARNING + 1):
        assert pace.within(step) == math.inf
        pace.took(step, 100.0)
    assert pace.within(LEARNING + 1) == math.inf, "the first steps are none to go by"
    pace.took(LEARNING + 1, 1.0)
    assert pace.within(LEARNING + 2) == HANG
    assert paced(20, 6.0).within(10) == math.inf, "a step with a validation"
    assert paced(0, 6.0).within(11) == math.inf, "not wanted"


def test_the_launcher_waits_longer_than_the_ranks_and_for_saves():
    assert paced(20, 6.0).until(11, save_seconds=30.0) == 2 * 120 + 4 * 30
    for pace, step, save_seconds in (
        (paced(20, 6), 11, 0),
        (paced(20, 6), 10, 9),
        (Pace(0, 9), 1, 9),
    ):
        assert pace.until(step, save_seconds) == 1.5 * pace.timeout
    assert Pace(20, 0).until(1, 0.0) == 0, "nobody knows"


def test_the_longest_step_includes_validation():
    assert paced(20, 6.0).longest == 600


def test_a_step_in_which_the_process_was_suspended_does_not_count():
    pace = paced(20, 6.0)
    pace.took(11, 9000.0, suspended=True)
    assert (pace.longest, pace.within(12)) == (600, 120)


@pytest.mark.parametrize(("after", "lost"), [(30, 12), (42, 0), (50, 0)])
def test_a_start_knows_how_many_steps_the_failure_before_it_has_cost(monkeypatch, after, lost):
    monkeypatch.delenv(protocol.RESTARTS, raising=False)
    assert history(after) == {}
    monkeypatch.setenv(protocol.RESTARTS, "2")
    monkeypatch.setenv(protocol.REACHED, "42")
    assert history(after) == {"restarts": 2, "lost_steps": lost}
    assert history(after, recorded=44)["lost_steps"] == max(0, 44 - after)


def test_progress_goes_through_the_file_that_the_launcher_names(tmp_path, monkeypatch):
    path = tmp_path / "progress.json"
    Heartbeat(Group()).tell(3, 60.0)
    assert protocol.read_progress(path, "-0").step == -1, "nobody asked"
    monkeypatch.setenv(protocol.PROGRESS, str(path))
    Heartbeat(Group()).tell(3, 60.0)
    assert protocol.read_progress(path, "-0")[:2] == (3, 60.0)
    heartbeat = Heartbeat(Group())
    for step, due in ((4, 60.0), (5, 60.0), (6, 900.0), (7, 60.0)):
        heartbeat.tell(step, due)
    assert protocol.read_progress(path, "-0")[:2] == (6, 900.0), "a longer wait is told at once"
    for step, due in ((8, 0.0), (9, 900.0)):
        heartbeat.tell(step, due)
    assert protocol.read_progress(path, "-0")[:2] == (8, 0.0), "no limit is longer than any"
    monkeypatch.setenv(protocol.PROGRESS, str(tmp_path / "missing" / "progress.json"))
    Heartbeat(Group()).tell(4, 60.0)


def test_a_full_file_system_takes_no_progress_away(tmp_path):
    path = tmp_path / "progress.json"
    protocol.write_progress(path, "a-0", 3, 60.0)
    before = path.stat()
    protocol.write_progress(path, "a-0", 123456789, 1234.5678901234567, done=True)
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    told = protocol.read_progress(path, "a-0")
    assert told[:3] == (123456789, 1234.5678901234567, True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        protocol.write_progress(path, "a-0", 4, 60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert protocol.read_progress(path, "a-0") == told, "the write has failed"
    assert protocol.read_progress(path, "a-1").step == -1, "another attempt's"
    path.write_text("")
    assert protocol.read_progress(path, "a-0", told) == told, "no news"
