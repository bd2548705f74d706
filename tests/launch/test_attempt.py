"""One attempt of a job, with a program in place of its launcher."""

from __future__ import annotations

import os
import time

from hpc_train.launch.attempt import Attempt
from hpc_train.launch.lines import Line


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
