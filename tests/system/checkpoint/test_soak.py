"""A job that is killed at random moments; `soak.py` beside it does it for hours, by hand."""

from __future__ import annotations

import pytest

from tests.system.checkpoint.soak import soak


@pytest.mark.long
@pytest.mark.slow("jobs of four ranks that start again after each kill")
def test_a_job_that_is_killed_at_random_moments_ends_as_one_that_is_not(tmp_path):
    done = soak(tmp_path, kills=2, seed=1, steps=30)
    assert done.killed.total() == 2
    assert done.equal == done.jobs > 0
