"""Features that are made of a table in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpc_train.data.tables.arrays_table import TableArrays
from hpc_train.data.tables.far_values import FarValues
from hpc_train.data.tables.features import TableFeatures
from hpc_train.data.tables.fit import fit_categorical, fit_features, fit_numeric


@given(arrays(np.float64, st.integers(1, 40), elements=st.floats(width=32)))
def test_numbers_are_scaled_and_edges_rise(values):
    far = FarValues()
    made = fit_numeric("x", "x", None, values, far=far)
    scaled = made.values({"x": values})
    known = scaled[np.isfinite(values)]
    assert made.scale > 0
    widths = np.diff(np.array(made.edges, np.float32))  # a model reads this type
    assert (widths > 0).all()
    assert np.isfinite(1 / widths).all()
    assert np.isfinite(known).all()
    if len(made.edges) > 2:
        if not far.found:
            assert known.mean() == pytest.approx(0, abs=1e-6)
            assert known.std() == pytest.approx(1, rel=1e-6)
        ends = made.edges[:: len(made.edges) - 1]
        np.testing.assert_allclose(ends, [known.min(), known.max()], atol=1e-30)


@pytest.mark.parametrize(
    "values",
    [
        [-1.7e308, 1.7e308],
        [0.0, 5e-324],
        [0.0] * 99 + [1e-323],
        [-1.7e308] * 9 + [1.7e308],
        [-1.0, 0.0, 1.0, 1e-42, -1e-42],
        [1e13, *np.arange(1000.0)],
    ],
)
def test_numbers_at_the_ends_of_float64_make_features(values):
    made = fit_numeric("x", "x", None, np.array(values))
    assert 0 < made.scale < np.inf
    assert np.isfinite([made.center, *made.edges]).all()
    assert np.isfinite(1 / np.diff(np.array(made.edges, np.float32))).all()


def test_edges_are_exact_quantiles():
    made = fit_numeric("x", "x", None, np.arange(101.0), bins=4)
    np.testing.assert_allclose(
        np.array(made.edges) * made.scale + made.center, [0, 25, 50, 75, 100], atol=1e-5
    )


def test_categories_are_ordered_by_count_then_value():
    values = np.array(["b", "c", None, "a", "c", "b", "d"], object)
    made = fit_categorical("x", values, max_categories=3)
    assert made.categories == ("b", "c", "a")
    np.testing.assert_allclose(made.shares, np.array([1, 1, 2, 2, 1]) / 7)
    assert made.values({"x": values}).tolist() == [2, 3, 1, 4, 3, 2, 0]


def test_a_date_has_the_parts_that_vary():
    days = np.array([0.0, 40.0, 41.0, np.nan]) * 86400
    made = fit_features({"when": days}, {"when": "date"}, None)
    assert [one.name for one in made.numeric] == ["when.days", "when.month", "when.weekday"]
    both = {"when": days, "when.month": days}
    made = fit_features(both, {"when": "date", "when.month": "numeric"}, None)
    assert len({one.name for one in made.numeric}) == 4
    assert TableFeatures.from_tree(made.to_tree()) == made


def test_rows_of_a_table_in_memory_are_fetched_by_number():
    numbers = torch.arange(12.0).view(6, 2)
    table = TableArrays(numbers, torch.arange(6)[:, None], torch.arange(6), torch.ones(6))
    assert len(table) == 6
    numeric, categorical, target, weight = table.fetch(np.array([4, 1]))
    assert numeric.tolist() == [[8.0, 9.0], [2.0, 3.0]]
    assert categorical.tolist() == [[4], [1]]
    assert target.tolist() == [4, 1]
    assert weight.tolist() == [1.0, 1.0]
