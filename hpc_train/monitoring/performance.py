"""What a performance test and its readers agree on."""

from __future__ import annotations

PERFORMANCE = "performance.json"
"""The file of the result, in the run directory."""


def usual_warmup(steps: int) -> int:
    """The number of steps that do not count at the start of a test: a quarter, but at least one.

    In the first steps libraries allocate memory, and caches of the data are empty.
    """
    return max(1, steps // 4)
