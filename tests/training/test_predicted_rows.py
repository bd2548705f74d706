from __future__ import annotations

import numpy as np
import pytest

from hpc_train.data.tables.features import Categories, TargetValues
from hpc_train.training.predicted_rows import PredictionColumns


@pytest.mark.parametrize("classes", [("False", "True"), ("false", "true")])
def test_truth_values_are_scored_however_a_format_writes_them(classes):
    target = TargetValues(task="classification", names=("y",), classes=classes, shares=(0.5, 0.5))
    columns = PredictionColumns(target, (), scored=True)
    truth = Categories(np.array([0, 1, 2, 3, -1], np.int32), ("true", "False", "TRUE ", "maybe"))
    made = columns.batch(np.arange(5), {"y": truth}, np.full((5, 2), 0.5))
    assert columns.scored_rows(made)["target"].tolist() == [1, 0, 1]
    assert columns.of_unknown_class(made) == 1
