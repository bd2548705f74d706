"""Damage at random is told or counted. `malformed_tables.py` beside it tries more."""

from __future__ import annotations

import pytest

from tests.data.malformed_tables import damage_tables


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_damage_is_told_or_counted(tmp_path, count):
    found = damage_tables(tmp_path, count, seed=count)
    ends = sum(found.values(), start=type(next(iter(found.values())))())
    assert ends.total() == count
    assert all(ends[end] for end in ("told", "counted", "right"))
