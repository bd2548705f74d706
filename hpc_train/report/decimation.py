"""Keeps curves of any length in bounded memory, with all extremes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BUCKETS = 1024  # most buckets of a curve; a power of two, because buckets are merged in pairs


@dataclass
class Curve:
    """What is kept of the values of one key. An array has one element per bucket.

    Args:
        low: the least value of each bucket; NaN where it has none.
        high: the greatest value.
        total: the sum of the values.
        count: the number of values.
    """

    low: Floats
    high: Floats
    total: Floats
    count: Floats
    last: tuple[float, float] = (np.nan, np.nan)  # the last value, and its step
    least: tuple[float, float] = (np.nan, np.nan)  # the least value of all, and its step

    @classmethod
    def empty(cls, size: int) -> Curve:
        """A curve without values."""
        return cls(np.full(size, np.nan), np.full(size, np.nan), np.zeros(size), np.zeros(size))

    def merged(self, size: int) -> Curve:
        """The curve with every two buckets merged, in arrays of `size` buckets."""
        other, half = Curve.empty(size), len(self.low) // 2
        other.low[:half] = np.fmin(self.low[0::2], self.low[1::2])
        other.high[:half] = np.fmax(self.high[0::2], self.high[1::2])
        other.total[:half] = self.total[0::2] + self.total[1::2]
        other.count[:half] = self.count[0::2] + self.count[1::2]
        other.last, other.least = self.last, self.least
        return other

    def mean(self) -> Floats:
        """The mean of each bucket; NaN where it has no value."""
        with np.errstate(invalid="ignore"):
            return np.where(self.count > 0, self.total / self.count, np.nan)


class Decimation:
    """Divides records into buckets of equally many records.

    When they are full, every two are merged. So the time is linear in the number of records, the
    memory does not depend on it, and no extreme is lost.

    Args:
        most: most buckets, a power of two.

    Attributes:
        curves: for each key what is kept.
        records: number of records so far.
        width: number of records of a bucket.
    """

    def __init__(self, most: int = BUCKETS) -> None:
        self.most = most
        self.curves: dict[str, Curve] = {}
        self.records, self.width = 0, 1

    def add(self, steps: Floats, columns: Mapping[str, Floats]) -> None:
        """Add records.

        Args:
            steps: the step of each record.
            columns: for each key its value in each record, float64; NaN where there is none.
        """
        count = len(steps)
        if not count:
            return
        while self.records + count > self.width * self.most:
            self.width *= 2
            for key, curve in self.curves.items():
                self.curves[key] = curve.merged(self.most)
        place = (self.records + np.arange(count)) // self.width
        begins = np.flatnonzero(np.diff(place, prepend=-1))
        buckets = place[begins]
        self.records += count
        for key, values in columns.items():
            if key not in self.curves:
                self.curves[key] = Curve.empty(self.most)
            _add(self.curves[key], steps, values, begins, buckets)

    def used(self, most: int) -> tuple[dict[str, Curve], int]:
        """All curves without empty buckets at their end, merged to at most `most` buckets.

        Returns:
            The curves, and the number of records of a bucket.
        """
        curves, width = self.curves, self.width
        while -(-self.records // width) > max(1, most):
            width *= 2
            curves = {key: curve.merged(len(curve.low) // 2) for key, curve in curves.items()}
        size = -(-self.records // width)
        cut = {
            key: Curve(
                curve.low[:size],
                curve.high[:size],
                curve.total[:size],
                curve.count[:size],
                curve.last,
                curve.least,
            )
            for key, curve in curves.items()
        }
        return cut, width


def _add(
    curve: Curve,
    steps: Floats,
    values: Floats,
    begins: NDArray[np.intp],
    buckets: NDArray[np.intp],
) -> None:
    there = np.flatnonzero(np.isfinite(values))
    if not len(there):
        return
    if len(there) < len(values):
        values = np.where(np.isfinite(values), values, np.nan)
    curve.low[buckets] = np.fmin(curve.low[buckets], np.fmin.reduceat(values, begins))
    curve.high[buckets] = np.fmax(curve.high[buckets], np.fmax.reduceat(values, begins))
    with warnings.catch_warnings():  # sums of the largest numbers overflow
        warnings.simplefilter("ignore", RuntimeWarning)
        curve.total[buckets] += np.add.reduceat(np.nan_to_num(values), begins)
    curve.count[buckets] += np.add.reduceat(np.isfinite(values).astype(np.float64), begins)
    curve.last = (float(values[there[-1]]), float(steps[there[-1]]))
    least = there[np.argmin(values[there])]
    if not curve.least[0] <= values[least]:
        curve.least = (float(values[least]), float(steps[least]))
