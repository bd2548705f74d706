"""The lengths of samples, and the numbers of items that batches count."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    # As `fetch` gets them: NumPy and torch take a tuple as an index of several dimensions.
    found = np.asarray(dataset.lengths(np.asarray(indices, np.int64)))
    if found.shape != (len(indices),) or found.dtype.kind not in "iu" or (found < 0).any():
        raise UserError(
            f"`lengths` of the data set returned {found!r:.60} for "
            f"{plural(len(indices), 'sample')}",
            "let it return one whole number for each sample, 0 or more",
        )
    return found.astype(np.int64)


def items_in(batch: Any, counted: Callable[[Any], Any]) -> int:
    """What a function counts in a batch. One element of a tensor or an array will do.

    Raises:
        UserError: it is no whole number, 0 or more.
    """
    found = counted(batch)
    with suppress(TypeError, ValueError, RuntimeError):  # of values and tensors that are no number
        one = found.item() if hasattr(found, "item") else found
        # A sum of floats is rounded where one more would make no difference.
        if isinstance(one, float) and one.is_integer() and float(found + 1) == one + 1:
            one = int(one)
        if operator.index(one) >= 0:
            return operator.index(one)
    raise UserError(
        f"`counted` returned {found!r:.60}", "let it return the number of items as an integer >= 0"
    )
