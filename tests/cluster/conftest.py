"""Skips the tests of emulated hosts, and of SLURM over them, where these cannot be made."""

from __future__ import annotations

import pytest

from tests.cluster import hosts, slurm


@pytest.fixture(scope="module", autouse=True)
def possible(request):
    """Asked when the first test runs: ranks that only collect a module start nothing."""
    needed = slurm if hasattr(request.module, "slurm") else hosts
    if why := needed.why_not():
        pytest.skip(why)
