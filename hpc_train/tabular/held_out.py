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

    It is a function of its arguments alone. Of each class the same share is held out, rounded, but
    never the whole class. Of fewer than FEWEST_ROWS rows none is.

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
    for stratum in np.unique(strata).tolist():
        members = np.flatnonzero(strata == stratum)
        count = min(round(fraction * len(members)), len(members) - 1)
        order = Permutation(len(members), mix(int(seed), HELD_OUT_ROWS), stratum)
        chosen[members[order(np.arange(count))]] = True
    return chosen
