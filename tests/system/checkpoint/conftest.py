"""What several tests of checkpoints need."""

from __future__ import annotations

from tests.checkpoint.conftest import small_extents

__all__ = ["small_extents"]
