"""Columns of arrays and DataFrames, by their types."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from hpc_train.tabular.columns import read_columns

DAY = 86400.0
NAN = float("nan")
COLUMNS = {
    "float32": (np.array([1.5, NAN], "f4"), "numeric", [1.5, NAN]),
    "int": (np.array([3, -1]), "numeric", [3.0, -1.0]),
    "bool": (np.array([True, False]), "numeric", [1.0, 0.0]),
    "Int64": (pd.array([3, None], "Int64"), "numeric", [3.0, NAN]),
    "boolean": (pd.array([True, None], "boolean"), "numeric", [1.0, NAN]),
    "objects": (np.array([2, None], object), "numeric", [2.0, NAN]),
    "timedelta": (pd.to_timedelta([1, None], "D"), "numeric", [DAY, NAN]),
    "decimals": (np.array([Decimal("1.5"), None], object), "numeric", [1.5, NAN]),
    "text": (np.array(["a", None], object), "categorical", ["a", None]),
    "string": (pd.array(["a", None], "string"), "categorical", ["a", None]),
    "category": (pd.Categorical([2.0, None]), "categorical", ["2", None]),
    "mixed": (np.array(["a", 2.0], object), "categorical", ["a", "2"]),
    "naive": (pd.to_datetime(["1970-01-02", None]), "date", [DAY, NAN]),
    "zone": (pd.to_datetime(["1970-01-02 01:00+01:00", None]), "date", [DAY, NAN]),
    "arrow zone": (
        pd.array([dt.datetime(1970, 1, 2), None], "timestamp[us, UTC][pyarrow]"),
        "date",
        [DAY, NAN],
    ),
    "arrow date": (pd.array([dt.date(1970, 1, 2), None], "date32[pyarrow]"), "date", [DAY, NAN]),
    "date": (np.array([dt.date(1970, 1, 2), None], object), "date", [DAY, NAN]),
    "nothing": (np.array([None, pd.NA], object), "numeric", [NAN, NAN]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_the_type_of_a_column_decides(name):
    values, kind, expected = COLUMNS[name]
    columns, kinds = read_columns(pd.DataFrame({name: values}), [name])
    assert kinds == {name: kind}
    np.testing.assert_array_equal(columns[name], np.array(expected, columns[name].dtype))


@pytest.mark.parametrize("dtype", ["f8", "i4", "?", "U3", object, "M8[D]"])
def test_arrays_are_read_as_data_frames_of_their_type(dtype):
    table = np.array([[1, 0], [0, 1]]).astype(dtype)
    names = ["a", "b"]
    of_array, kinds = read_columns(table, names)
    of_frame, same = read_columns(pd.DataFrame(table, columns=names), names)
    assert kinds == same
    for name in names:
        np.testing.assert_array_equal(of_array[name], of_frame[name])


def test_what_a_column_held_before_is_kept():
    table = pd.DataFrame({"code": [1.0, NAN], "size": ["2.5", None], "plan": [None, None]})
    columns, _ = read_columns(
        table, [*table], {"code": "categorical", "size": "numeric", "plan": "categorical"}
    )
    assert columns["code"].tolist() == ["1", None]
    np.testing.assert_array_equal(columns["size"], [2.5, NAN])
    assert columns["plan"].tolist() == [None, None]
    truth = pd.DataFrame({"paid": np.array([True, None], object)})
    assert read_columns(truth, ["paid"], {"paid": "categorical"})[0]["paid"].tolist() == [
        "True",
        None,
    ]
    with pytest.raises(ValueError, match="'code' holds numbers, but it held dates in fit"):
        read_columns(table[["code"]], ["code"], {"code": "date"})


@pytest.mark.parametrize(
    ("value", "error"), [({}, TypeError), (1j, ValueError), (10**400, ValueError)]
)
def test_other_values_are_refused(value, error):
    with pytest.raises(error, match="column 'x'"):
        read_columns(pd.DataFrame({"x": np.array([1.0, value], object)}), ["x"])


def test_periods_are_refused_with_what_to_give():
    table = pd.DataFrame({"t": pd.period_range("2024-01", periods=3, freq="M")})
    with pytest.raises(TypeError, match=r"'t' holds Period: give .*\.dt\.to_timestamp\(\)"):
        read_columns(table, ["t"])
