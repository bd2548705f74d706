"""Divide layers over stages: consecutive runs whose largest cost is as small as possible."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise


def divide(costs: Sequence[float], parts: int) -> list[range]:
    """Divide items into consecutive runs so that the largest sum of a run is as small as possible.

    Each run has at least one item. Several divisions can have the same largest sum. Of these, the
    runs are filled in order: each takes the items whose sum is nearest to an even share of the
    rest, and fewer of them in a tie. The smallest possible largest sum is found by bisection
    over "does this bound suffice" (Pinar and Aykanat, "Fast optimal load balancing algorithms for
    1D partitioning", JPDC 64, 2004). The bisection uses integers, so the result is exact.

    Args:
        costs: the items' costs in order, each finite and at least 0.
        parts: number of runs.

    Returns:
        The items of each run.

    Raises:
        ValueError: fewer items than runs, no runs, or a cost that is negative or not finite.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} items cannot be divided into {parts} runs")
    if not all(0 <= cost < math.inf for cost in costs):
        raise ValueError(f"costs must be finite and not negative: {list(costs)}")
    integers = _integers(costs)
    totals = [0, *accumulate(integers)]
    return _even_runs(integers, totals, parts, _least_bound(totals, parts))


def _integers(costs: Sequence[float]) -> list[int]:
    """The costs, multiplied by the smallest number that makes all of them integers."""
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


def _longest(totals: Sequence[int], start: int, bound: int) -> int:
    """The end of the longest run from `start` whose sum is at most `bound`."""
    return bisect_right(totals, totals[start] + bound) - 1


def _least_bound(totals: Sequence[int], parts: int) -> int:
    """The smallest bound with which `parts` runs hold all items."""
    low, high = max(b - a for a, b in pairwise(totals)), totals[-1]
    while low < high:
        middle = (low + high) // 2
        start = 0
        for _ in range(parts):
            start = _longest(totals, start, middle)
        low, high = (low, middle) if start == len(totals) - 1 else (middle + 1, high)
    return low


def _even_runs(costs: Sequence[int], totals: Sequence[int], parts: int, bound: int) -> list[range]:
    """Runs whose sums stay within a sufficient bound, each near its share of the rest."""
    items = len(totals) - 1
    needed = [0] * (items + 1)  # the fewest runs that hold the items from each position on
    for start in reversed(range(items)):
        needed[start] = 1 + needed[_longest(totals, start, bound)]
    runs, start = [], 0
    for left in range(parts, 0, -1):
        share = _even_share(costs[start:], left)
        last = min(_longest(totals, start, bound), items - (left - 1))
        ends = (end for end in range(start + 1, last + 1) if needed[end] < left)
        end = min(ends, key=lambda end: abs(totals[end] - totals[start] - share))
        runs.append(range(start, end))
        start = end
    return runs


def _even_share(costs: Sequence[int], parts: int) -> Fraction:
    """The mean sum of the runs, not counting items so large that they fill a run alone."""
    rest = sum(costs)
    for large in sorted(costs, reverse=True):
        if parts == 1 or large * parts <= rest:
            break
        rest, parts = rest - large, parts - 1
    return Fraction(rest, parts)
