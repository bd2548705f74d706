"""Waits that leave the core to other ranks."""

from __future__ import annotations

import time

SPIN_SECONDS = 50e-6  # a polite wait looks without sleeping for this time
LONGEST_SLEEP = 500e-6


class Idle:
    """Paces a loop that waits: it spins, or sleeps if it is polite.

    A polite wait sleeps an eighth of the time waited so far between two looks. A spinning rank that
    shares a core with a rank it waits for would slow that one down.

    Args:
        polite: whether to sleep, for nodes with more ranks than cores.
    """

    def __init__(self, *, polite: bool = False) -> None:
        self.polite = polite
        self._since = time.perf_counter()

    def reset(self) -> None:
        """Count the wait from now, because something has happened."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Wait a moment, because nothing has happened."""
        waited = time.perf_counter() - self._since
        if self.polite and waited > SPIN_SECONDS:
            time.sleep(min(waited / 8, LONGEST_SLEEP))
