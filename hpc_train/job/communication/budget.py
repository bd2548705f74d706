"""Divides the time of `hpc-train info collectives` among its measurements."""

from __future__ import annotations

import time
from collections.abc import Callable

WARM_UP, CHECKED = 2, 1  # calls of a case that are not timed: the first ones, and the checked one
FEWEST_REPEATS = 3  # repeats of a case, at least
# A case that needs more time than these parts of its share and of the rest is left out.
PATIENCE, OF_THE_REST = 3.0, 0.02
DOUBLED_AT = 4 << 20  # a case of this size gets twice the time of one of no bytes


class Budget:
    """How often each case is repeated, so that all of them end in time. Used on rank 0.

    Large messages get more of the time than small ones, because a call of theirs takes longer.

    Args:
        seconds: the time for all cases.
        sizes: bytes of all cases.
        clock: tells the time in seconds.
    """

    def __init__(
        self, seconds: float, sizes: list[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._left = sum(1 + size / DOUBLED_AT for size in sizes)

    def share(self, nbytes: int, predicted: float) -> float:
        """Seconds for the next case; 0 if there is no time for it.

        Args:
            nbytes: its size. Each case must be asked for, so that the others get their share.
            predicted: seconds of one call, as the last size lets expect; 0 if nothing is known.
        """
        weight, rest = 1 + nbytes / DOUBLED_AT, self._end - self._clock()
        share = max(0.0, rest) * weight / max(weight, self._left)
        self._left -= weight
        needed = predicted * (WARM_UP + FEWEST_REPEATS + CHECKED)
        return share if needed <= max(PATIENCE * share, OF_THE_REST * rest) else 0.0


def repeats(share: float, seconds: float, most: int) -> int:
    """The number of repeats of a call that fit in its share of the time, at most `most`."""
    return min(most, max(FEWEST_REPEATS, int(share / seconds) - WARM_UP - CHECKED))
