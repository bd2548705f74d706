"""What several tests of checkpoints need."""

from __future__ import annotations

import pytest

from hpc_train.checkpoint import fileformat
from tests.checkpoint.states import SMALL


@pytest.fixture
def small_extents(monkeypatch):
    """Several extents in a small file."""
    for name, value in SMALL.items():
        monkeypatch.setattr(fileformat, name, value)
