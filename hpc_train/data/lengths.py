"""The lengths of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpc_train.errors import UserError, plural


def lengths_of(dataset: Any, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """The lengths that a data set's `lengths` gives for some samples, int64.

    Raises:
        UserError: it is no method, or they are not one whole number for each sample, 0 or more.
    """
    if not callable(dataset.lengths):
        raise UserError(
            f"`lengths` of the data set is no method, but of type {type(dataset.lengths).__name__}",
            "give it a method lengths(indices), which returns the lengths of these samples",
        )
    found = np.asarray(dataset.lengths(indices))
    if found.shape != (len(indices),) or found.dtype.kind not in "iu" or (found < 0).any():
        raise UserError(
            f"`lengths` of the data set returned {found!r:.60} for "
            f"{plural(len(indices), 'sample')}",
            "let it return one whole number for each sample, 0 or more",
        )
    return found.astype(np.int64)
