"""Values that are far from most others."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_train.data.tables.far_values import FarValues
from hpc_train.data.tables.fit import fit_numeric

NORMAL = np.random.default_rng(0).normal(5, 2, 5000)


@pytest.mark.parametrize("share", [0.001, 0.4])
@pytest.mark.parametrize("code", [1e12, -9.969209968386869e36, 1e200])
def test_all_other_values_stay_apart_in_float32(code, share):
    far = FarValues()
    filled = np.where(np.arange(5000) < share * 5000, code, NORMAL)
    made = fit_numeric("x", "x", None, filled, far=far)
    assert far.found == {"x": code}
    assert len(made.edges) > 25
    scaled = made.values({"x": np.append(filled, [code * 10, np.inf])}).astype(np.float32)
    assert len(np.unique(scaled[:-2][filled != code])) > 0.9 * (filled != code).sum()
    assert np.abs(scaled[:-1]).max() < 1000
    assert np.isnan(scaled[-1])


@pytest.mark.parametrize("values", [[0, 1, 1e37], [-1e37, 1, 2, 3], [-1e37, 0, 1, 1e37]])
def test_few_different_values_stay_apart(values):
    made = fit_numeric("x", "x", None, np.repeat(np.array(values, np.float64), 50))
    assert len(np.unique(made.values({"x": np.array(values)}).astype(np.float32))) == len(values)


def test_other_columns_are_scaled_by_mean_and_deviation():
    far = FarValues()
    for values in (NORMAL, np.exp(NORMAL * 2), np.append(NORMAL, -9999.0)):
        made = fit_numeric("x", "x", None, values, far=far)
        assert made.center == pytest.approx(values.mean(), rel=1e-12)
        assert made.scale == pytest.approx(values.std(), rel=1e-12)
    assert far.found == {}
