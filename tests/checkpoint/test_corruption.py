"""Damaged checkpoints are noticed; `tests/checkpoint/corruption.py` tries more of them by hand."""

from __future__ import annotations

from hpc_train.checkpoint import fileformat
from tests.checkpoint.corruption import ALIGNMENT, EXTENT, damage_many

COUNT = 5000


def test_random_damage_is_noticed_and_never_crashes_the_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(fileformat, "EXTENT_BYTES", EXTENT)
    monkeypatch.setattr(fileformat, "ALIGNMENT", ALIGNMENT)
    found = damage_many(tmp_path, COUNT, seed=1)
    assert sum(counts.total() for counts in found.values()) == COUNT
    assert all(counts[True] > 0 for counts in found.values())
