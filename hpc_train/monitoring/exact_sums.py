"""Sums of float64 numbers without rounding, so that their order makes no difference.

Every finite float64 number is a whole multiple of 2**-1126. A sum is therefore a Python integer,
which counts these units and has no largest value. It is rounded once, when it is asked for. Ranks
may add any part of the numbers in any order: their sums are equal to the last bit. The idea is that
of Kulisch's long accumulator, "Computer Arithmetic and Validity", 2008.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from hpc_train.mpi.group import Group

BITS = 53  # of a float64's significand
LEAST = -1073  # the smallest exponent of `frexp`
UNIT = BITS - LEAST  # sums count units of 2 ** -UNIT
LOW = 26  # a significand is added in two parts, each exact as the sum of up to 2**26 of them


class ExactSums:
    """Several sums, by their places.

    Args:
        places: number of sums.
    """

    def __init__(self, places: int) -> None:
        self._units = [0] * places
        self._undefined = [0] * places  # how many infinite numbers and NaNs came

    def add(self, *terms: tuple[np.ndarray, np.ndarray | int]) -> None:
        """Add numbers.

        Args:
            terms: numbers, float (N,) with N up to 2**26, and the place of each, int (N,), or one
                place for all of them.
        """
        numbers = np.concatenate([np.asarray(values, np.float64) for values, _ in terms])
        places = np.concatenate([np.broadcast_to(at, len(values)) for values, at in terms])
        if not (finite := np.isfinite(numbers)).all():
            for place in places[~finite].tolist():
                self._undefined[place] += 1
            numbers, places = numbers[finite], places[finite]
        if not len(numbers):
            return
        significands, exponents = np.frexp(numbers)
        whole = np.ldexp(significands, BITS).astype(np.int64)
        least = exponents.min()
        width = int(exponents.max() - least) + 1
        keys = places * width + (exponents - least)
        high, low = (np.bincount(keys, part) for part in (whole >> LOW, whole & ((1 << LOW) - 1)))
        for key in np.flatnonzero((high != 0) | (low != 0)).tolist():
            place, more = divmod(key, width)
            units = (int(high[key]) << LOW) + int(low[key])
            self._units[place] += units << (int(least) - LEAST + more)

    def over(self, group: Group) -> list[float]:
        """The sums of all ranks' numbers, rounded, by place. Collective.

        A sum is NaN if an infinite number or a NaN was added, and infinite if it is too large.
        """
        found = group.summed([*self._units, *self._undefined])
        count = len(self._units)
        return [*_rounded(found[:count], found[count:])]


def _rounded(units: list[int], undefined: list[int]) -> Iterable[float]:
    for number, broken in zip(units, undefined, strict=True):
        try:
            yield math.nan if broken else number / (1 << UNIT)
        except OverflowError:
            yield math.inf if number > 0 else -math.inf
