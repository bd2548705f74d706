"""Chooses the rows that are held out of training, to decide when it ends."""

from __future__ import annotations

import numpy as np

from hpc_train.data.order import Permutation
from hpc_train.seeds import mix

FEWEST_ROWS = 20  # a table with fewer rows holds none out
HELD_OUT_ROWS = 3  # part of the seed


def choose_held_out(
    rows: int, fraction: float, seed: int, classes: np.ndarray | None = None
) -> np.ndarray:
    """The rows that are held out, as a mask, bool (rows,).

    It is a function of its arguments alone. Of each class the same share is held out, but never the
    whole class. Shares are rounded so that they add up to that of all rows, if the classes have
    rows enough. Of fewer than FEWEST_ROWS rows none is held out.

    Args:
        rows: number of rows.
        fraction: share of the rows to hold out.
        seed: chooses the rows.
        classes: the class of each row, int (rows,); None: there are no classes.
    """
    chosen = np.zeros(rows, bool)
    if rows < FEWEST_ROWS:
        return chosen
    strata = np.zeros(rows, np.int64) if classes is None else classes
    found, sizes = np.unique(strata, return_counts=True)
    for stratum, count in zip(found.tolist(), _counts(sizes, fraction).tolist(), strict=True):
        members = np.flatnonzero(strata == stratum)
        order = Permutation(len(members), mix(int(seed), HELD_OUT_ROWS), stratum)
        chosen[members[order(np.arange(count))]] = True
    return chosen


def _counts(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """The rows to hold out of each class. Those with the largest remainders are rounded up."""
    shares = fraction * sizes
    counts: np.ndarray = np.minimum(shares.astype(np.int64), sizes - 1)
    missing = round(fraction * sizes.sum()) - counts.sum()
    remainders = np.where(counts < sizes - 1, counts - shares, np.inf)
    up = np.argsort(remainders, kind="stable")[: max(missing, 0)]
    counts[up] += remainders[up] < np.inf
    return counts
