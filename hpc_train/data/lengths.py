"""The lengths of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpc_train.errors import UserError, plural


def lengths_of(dataset: Any, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """The lengths that a data set's `lengths` gives for some samples, int64.

    Raises:
        UserError: they are not one whole number for each sample, 0 or more.
    """
    found = np.asarray(dataset.lengths(indices))
    if found.shape != (len(indices),) or found.dtype.kind not in "iu" or (found < 0).any():
        raise UserError(
            f"`lengths` of the data set returned {found!r:.60} for "
            f"{plural(len(indices), 'sample')}",
            "let it return one whole number for each sample, 0 or more",
        )
    return found.astype(np.int64)
