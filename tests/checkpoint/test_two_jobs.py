"""Few of the interleavings that `python -m tests.checkpoint.two_jobs` tries."""

from __future__ import annotations

import pytest

from tests.checkpoint.two_jobs import EVENTS, many
from tests.programs import run  # noqa: F401  # marks this module as one that starts programs


@pytest.mark.slow("it starts four jobs in each of several cases, and a refused one waits")
def test_two_jobs_in_one_directory_lose_nothing(tmp_path):
    done = many(tmp_path, cases=len(EVENTS), seed=0, steps=150)
    assert done.total() == len(EVENTS)
    assert done["nothing: second refused"] + done["nothing: second trained"] == 1
    assert done["first asleep: second trained"] == 1
