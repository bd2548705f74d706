"""Short trials of a rank's processor: how fast it computes, and how fast its memory is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

PROBES = 5  # of each kind; the median counts
SMALL_MATRIX = 192  # three such matrices of float32 lie in a core's own cache
COPIED = 16 << 20  # bytes, more than a core's own cache


def arithmetic_seconds() -> float:
    """Seconds of products of small matrices, which lie in the core's own cache."""
    one, product = torch.ones(SMALL_MATRIX, SMALL_MATRIX), torch.empty(SMALL_MATRIX, SMALL_MATRIX)

    def multiply() -> None:
        for _ in range(4):
            torch.mm(one, one, out=product)

    return _median(multiply)


def memory_seconds() -> float:
    """Seconds of a copy of 16 MiB in memory."""
    source, target = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
    return _median(lambda: target.copy_(source))


def _median(trial: Callable[[], object]) -> float:
    """The median of the time of the trials in which this thread had a processor."""
    trial()
    found = []
    for _ in range(PROBES):
        begin = time.thread_time()
        trial()
        found.append(time.thread_time() - begin)
    return statistics.median(found)
