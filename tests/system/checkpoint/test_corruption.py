"""Damaged checkpoints are noticed; `corruption.py` beside it tries more of them by hand."""

from __future__ import annotations

import pytest

from tests.system.checkpoint.corruption import damage_many

COUNT = 5000


@pytest.mark.usefixtures("small_extents")
def test_random_damage_is_noticed_and_never_crashes_the_reader(tmp_path):
    found = damage_many(tmp_path, COUNT, seed=1)
    assert sum(counts.total() for counts in found.values()) == COUNT
    assert all(counts[True] > 0 for counts in found.values())
