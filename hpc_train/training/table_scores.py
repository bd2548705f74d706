"""Scores of the predictions of a model of tables, in memory that does not grow with the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpc_train.data.tables.features import TargetValues
from hpc_train.monitoring.external_sort import KEPT_NUMBERS, ExternalSort
from hpc_train.monitoring.scores import ClassScores, LabelScores, RocCurve, ValueScores
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group
from hpc_train.training.scoring import SampleParts, as_arrays, defined


class TableScores:
    """Adds up what the scores of predictions need, see `monitoring.scores`.

    Only the AUC needs more of the rows than sums. Their scores are sorted, see `ExternalSort`.

    Args:
        target: what is predicted.
        quantiles: the quantiles that a regression predicts; with none it predicts the mean.
        group: all ranks of the job.
        kept: how many probabilities a rank keeps in memory; more are written to a temporary file.
    """

    def __init__(
        self,
        target: TargetValues,
        quantiles: Sequence[float],
        group: Group,
        kept: int = KEPT_NUMBERS,
    ) -> None:
        self.target, self.group = target, group
        self.rows = 0
        """Number of rows that this rank has added."""
        self._sums: ClassScores | LabelScores | ValueScores
        if target.task == "classification":
            self._sums = ClassScores(len(target.classes))
        elif target.task == "multilabel":
            self._sums = LabelScores(len(target.names))
        else:
            self._sums = ValueScores(quantiles, target.center)
        self._columns = self._sums.columns
        self._sorted = ExternalSort(self._columns, kept) if self._columns else None

    def add(self, parts: SampleParts) -> None:
        """Add rows of every rank. Collective.

        Args:
            parts: numbers of rows, and what `TableLoss.measure` returns for them. Each row is that
                of one rank.

        Raises:
            DataError: the folder of temporary files is full; on all ranks.
        """
        with agreed(self.group):
            for numbers, tensors in parts:
                self.add_rows(as_arrays(tensors, len(numbers)))

    def add_rows(self, rows: Mapping[str, np.ndarray]) -> None:
        """Add rows of this rank.

        Args:
            rows: "predictions", "target" and "weight", as `TableLoss.measure` returns them. Rows
                count by their weights. The weights of `class_weights` do not count.

        Raises:
            DataError: the folder of temporary files is full.
        """
        predictions, target = rows["predictions"], rows["target"]
        weight = rows["weight"].astype(np.float64)
        if not len(weight):
            return
        self.rows += len(weight)
        if self.target.task == "multilabel":
            target = target > 0
        elif self.target.task == "regression":
            target = target.astype(np.float64) * self.target.scale + self.target.center
        samples = self._sums.add(target, predictions, weight)
        if self._sorted is not None and samples is not None:
            self._sorted.add(samples)

    def scores(self) -> dict[str, float]:
        """The scores of all ranks' rows that are defined, on all ranks. Collective.

        Raises:
            DataError: a temporary file cannot be read; on all ranks.
        """
        curves = [RocCurve() for _ in range(self._columns)]
        if self._sorted is not None:
            self._sorted.to_first(self.group, [curve.add for curve in curves])
        areas = self.group.from_first(lambda: [curve.area() for curve in curves])
        return defined(self._sums.of_all(self.group, areas))

    def close(self) -> None:
        """Remove the temporary file."""
        if self._sorted is not None:
            self._sorted.close()
