"""A table in memory as a data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class TableArrays:
    """The rows of a table in memory. Its batches are those of a prepared table.

    Args:
        numeric: scaled numeric features, float (N, n); NaN where a value is missing.
        categorical: codes of the categorical features, int64 (N, c).
        target: int64 (N,) numbers of classes, float (N,) scaled values, or float (N, labels) of 0
            and 1.
        weight: weights of the rows, float (N,); their mean over the training rows is 1.
    """

    def __init__(
        self, numeric: Tensor, categorical: Tensor, target: Tensor, weight: Tensor
    ) -> None:
        self.tensors = (numeric, categorical, target, weight)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def fetch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, ...]:
        """The rows of these numbers: numeric, categorical, target and weight."""
        index = torch.from_numpy(np.asarray(indices, np.int64))
        return tuple(tensor.index_select(0, index) for tensor in self.tensors)
