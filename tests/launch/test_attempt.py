"""One attempt of a job, with a program in place of its launcher."""

from __future__ import annotations

import os
import sys
import time

from hpc_train.launch.attempt import Attempt
from hpc_train.launch.lines import Line
from tests.waiting import wait_until


def test_a_launcher_that_was_suspended_with_its_job_counts_no_silence_for_that(
    tmp_path, monkeypatch
):
    looks, clock = [], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (1000 if looks else 0))
    attempt = Attempt(
        Line(["sleep", "0.5"], {}), os.environ, tmp_path / "progress", 60.0,
        lambda silence: looks.append(silence) or [],
    )  # fmt: skip
    outcome = attempt.watch()
    assert (outcome.code, outcome.silent) == (0, 0)
    assert max(looks) < 60


DEAF_AT_FIRST = """
import os, pathlib, signal, sys, time
from hpc_train.launch.protocol import attempt_of, write_progress
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
path = pathlib.Path(sys.argv[1])
path.with_name("deaf").touch()
while not path.with_name("go").exists():
    time.sleep(0.01)
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
write_progress(path, attempt_of(os.environ), 0, 60.0)
time.sleep(10)
"""


def test_a_stop_that_a_launcher_lost_before_its_ranks_began_is_asked_for_again(tmp_path):
    path = tmp_path / "progress"
    attempt = Attempt(Line([sys.executable, "-c", DEAF_AT_FIRST, str(path)], {}), os.environ, path)
    wait_until((tmp_path / "deaf").exists)
    attempt.ask_to_stop()
    (tmp_path / "go").touch()
    assert attempt.watch().code == 75
