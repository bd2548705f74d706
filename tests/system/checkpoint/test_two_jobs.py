"""A few of the interleavings that `rivals` and `two_jobs` try."""

from __future__ import annotations

import pytest

from tests.programs import python, run
from tests.system.checkpoint.two_jobs import EVENTS, many


@pytest.mark.slow("each case waits until one that is asleep is taken for gone")
def test_two_loops_in_one_directory_lose_nothing():
    done = run(*python("-m", "tests.system.checkpoint.rivals", "--cases", "6"))
    assert done.returncode == 0, done.stderr
    assert "6 interleavings" in done.stdout


@pytest.mark.long
def test_two_jobs_in_one_directory_lose_nothing(tmp_path):
    done = many(tmp_path, cases=len(EVENTS), seed=0, steps=150)
    assert done.total() == len(EVENTS)
    assert done["first asleep: second trained"] == 1
