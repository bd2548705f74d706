"""A trained model of a table, as an estimator keeps it: plain arrays, and what they mean."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import nn

from hpc_train.data.tables.features import RawColumns, TableFeatures
from hpc_train.models.shape import Shape
from hpc_train.training.device import choose_device
from hpc_train.training.table_losses import TableLoss, rows_not_finite, warn_of_not_finite

ROWS_PREDICTED_AT_ONCE = 8192
BUILDING = threading.RLock()
"""A thread holds it while it fits or builds a model.

Both change what all threads of a process share: torch's default type, and the random generators.
"""


class FittedTable:
    """A trained model that predicts. It can be pickled; nothing of it belongs to a job.

    Args:
        shape: the sizes of the model.
        weights: the model's parameters and buffers by name.
        features: how columns become what the model reads.
        loss: the loss that it was trained with, which makes predictions of the model's outputs.
    """

    def __init__(
        self,
        shape: Shape,
        weights: dict[str, np.ndarray],
        features: TableFeatures,
        loss: TableLoss,
    ) -> None:
        self.shape, self.weights, self.features, self.loss = shape, weights, features, loss
        self._module: nn.Module | None = None

    def predictions(self, columns: RawColumns) -> np.ndarray:
        """The predictions of some rows, on this rank alone; see `TableLoss.predictions`.

        They are computed in float64, so those of a row hardly depend on the rows beside it. But the
        numbers are rounded as they were in training, because the model was chosen with these. The
        log says of how many rows the predictions are not finite.

        Args:
            columns: the columns that the features are made of, N rows.

        Returns:
            float64 (N,), (N, classes), (N, labels) or (N, quantiles).
        """
        numeric, categorical = self.features.encode(columns)
        device = choose_device()
        module = self._built().to(device)
        found, rounded = [], getattr(torch, next(iter(self.weights.values())).dtype.name)
        with torch.no_grad():
            for first in range(0, len(numeric), ROWS_PREDICTED_AT_ONCE):
                rows = slice(first, first + ROWS_PREDICTED_AT_ONCE)
                numbers = torch.from_numpy(numeric[rows]).to(rounded).double().to(device)
                codes = torch.from_numpy(categorical[rows].astype(np.int64)).to(device)
                found.append(self.loss.predictions(module(numbers, codes)).cpu().numpy())
        predicted: np.ndarray = np.concatenate(found)
        warn_of_not_finite(rows_not_finite(predicted))
        return predicted

    def _built(self) -> nn.Module:
        with BUILDING:
            if self._module is None:
                with torch.random.fork_rng(devices=[]):
                    module: nn.Module = self.shape.build_unfilled(torch.float64)
                state = {name: torch.tensor(one) for name, one in self.weights.items()}
                module.load_state_dict(state)
                self._module = module.eval()
            return self._module

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": None}
