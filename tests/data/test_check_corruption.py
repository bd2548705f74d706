"""Damage at random is told, or the samples are right. `corruption.py` beside it tries more."""

from __future__ import annotations

import pytest

from tests.data.corruption import damage_many


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_damage_is_told_with_file_and_block_or_key(tmp_path, count):
    found = damage_many(tmp_path, count, seed=count)
    assert sum(counts.total() for counts in found.values()) == count
    assert all(counts[True] > 0 for kind, counts in found.items() if "sealed" not in kind)
