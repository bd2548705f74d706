"""Waits whose limits a machine does not use up while it stands still.

Virtual machines may stand still for minutes, while their clocks go on. A test does not fail because
of that: its limits end hangs, and they measure no speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds that a program may take


def wait_until(holds: Callable[[], object], limit: float = 180.0, pause: float = 0.02) -> None:
    """Wait until something holds.

    Args:
        holds: is asked again and again.
        limit: the seconds to wait; of one turn, which takes longer where the machine stands still,
            no more than a second counts.
        pause: the seconds between two questions.

    Raises:
        TimeoutError: it does not hold within the limit.
    """
    waited, begin = 0.0, time.monotonic()
    while not holds():
        if waited > limit:
            raise TimeoutError(f"not within {limit:g} seconds")
        time.sleep(pause)
        end = time.monotonic()
        waited, begin = waited + min(end - begin, 1.0), end


class Clock:
    """Stands in for the module `time` in a test of long waits: only `sleep` moves it on."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Go on at once."""
        self._now += seconds
