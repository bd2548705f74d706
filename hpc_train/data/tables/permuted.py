"""Rows of a table in which the values of one feature have changed places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hpc_train.data.order import Permutation


class PermutedFeature:
    """A data set whose rows have one feature from other rows.

    Which rows these are is a pseudo-random permutation, the same on every rank. It is computed when
    it is needed, so it takes no memory.

    Args:
        dataset: the rows; its `fetch` returns numeric and categorical features first, as that of
            `TableDataset` does.
        place: the place of the feature, the numeric ones counted first.
        seed: chooses the permutation.
    """

    def __init__(self, dataset: Any, place: int, seed: int) -> None:
        self.dataset, self.place = dataset, place
        self.permutation = Permutation(len(dataset), seed, place)

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Sequence[int] | np.ndarray) -> tuple[torch.Tensor, ...]:
        """Read rows, as the data set does, with the feature's values from other rows."""
        wanted = np.asarray(indices, np.int64)
        features = [*self.dataset.fetch(wanted)]
        others = self.dataset.fetch(self.permutation(wanted))
        numbers = features[0].shape[1]
        part, place = (0, self.place) if self.place < numbers else (1, self.place - numbers)
        features[part] = features[part].clone()
        features[part][:, place] = others[part][:, place]
        return tuple(features)
