"""Reads the columns of arrays and of pandas DataFrames, by their types.

pandas is not imported: a DataFrame is known by its methods.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from hpc_train.data.tables.schema import ColumnKind

_SECOND = np.timedelta64(1, "s")
_NO_VALUES = ("NAType", "NaTType")  # the types of pandas.NA and pandas.NaT
_DATES = (dt.date, np.datetime64)
_UTC = dt.UTC

Kinds = dict[str, ColumnKind]


def is_frame(table: Any) -> bool:
    """Whether an object is a pandas DataFrame, or behaves as one."""
    return hasattr(table, "iloc") and hasattr(table, "columns")


def check_even(rows: Any, name: str) -> None:
    """Check that the rows of an argument, if they are lists, have one length.

    Raises:
        ValueError: they have not.
    """
    if not isinstance(rows, (list, tuple)):
        flat = getattr(getattr(rows, "dtype", None), "char", "") == "O" and rows.ndim == 1
        rows = rows.tolist() if flat else ()
    nested = (list, tuple, set, np.ndarray)
    lengths = {len(row) if isinstance(row, nested) else -1 for row in rows}
    if len(lengths) > 1 or any(isinstance(row, set) for row in rows):
        raise ValueError(
            f"{name} has rows of different lengths, or sets: give all rows as many values; lists "
            "of labels become columns of 0 and 1 by scikit-learn's MultiLabelBinarizer"
        )


def read_columns(
    table: Any, names: Sequence[str], kinds: Mapping[str, ColumnKind] | None = None
) -> tuple[dict[str, np.ndarray], Kinds]:
    """Read the columns of a table.

    Numbers and truth values are numeric. Texts, and columns of pandas' type category, are
    categorical. In columns of type object, the values decide: numbers, dates, or else categories.
    Missing are None, NaN, pandas.NA and pandas.NaT. Dates without a time zone are taken as UTC.

    Args:
        table: a DataFrame, or an array of shape (N, columns).
        names: the names that the columns get, in their order.
        kinds: what the columns hold, as an earlier call returned it; None: their types decide.

    Returns:
        The columns by name, as `hpc_train.data.tables.features.RawColumns`, and what they hold.

    Raises:
        TypeError: a value is no number, text or date.
        ValueError: a column has complex numbers, or does not hold what `kinds` says.
    """
    columns: dict[str, np.ndarray] = {}
    found: Kinds = {}
    for place, name in enumerate(names):
        wanted = None if kinds is None else kinds[name]
        one = table.iloc[:, place] if is_frame(table) else table[:, place]
        columns[name], found[name] = _column(one, name, wanted)
    return columns, found


def _column(one: Any, name: str, wanted: ColumnKind | None) -> tuple[np.ndarray, ColumnKind]:
    values, kind = _read(one, name)
    if wanted is None or wanted == kind:
        return values, kind
    if wanted == "categorical" and kind == "numeric":
        known = [value for value in np.asarray(one, object).tolist() if not stands_for_none(value)]
        truth = all(isinstance(value, (bool, np.bool_)) for value in known)
        text = (lambda value: str(bool(value))) if truth else _text
        return _mapped(values, text, None, object), wanted
    if kind == "numeric" and np.isnan(values).all():  # nothing is known, so any kind will do
        return values, wanted
    if kind == "categorical" and all(value is None for value in values.tolist()):
        return np.full(len(values), np.nan), wanted
    if wanted == "numeric" and kind == "categorical":
        return _numbers_of_texts(values, name), wanted
    raise ValueError(f"column {name!r} holds {_SAID[kind]}, but it held {_SAID[wanted]} in fit")


_SAID = {"numeric": "numbers", "categorical": "categories", "date": "dates", "ignored": "nothing"}


def _read(one: Any, name: str) -> tuple[np.ndarray, ColumnKind]:
    """Read a column, a pandas Series or an array, by its type."""
    letter = getattr(one.dtype, "kind", "O")
    series = hasattr(one, "to_numpy")
    if hasattr(one, "cat"):
        texts = _objects([*map(_text, one.cat.categories.tolist()), None])
        return texts[np.asarray(one.cat.codes, np.int64)], "categorical"
    if letter == "c":
        raise ValueError(f"Complex data not supported: column {name!r} has complex numbers")
    if letter in "biuf":
        numbers = one.to_numpy(np.float64, na_value=np.nan) if series else one.astype(np.float64)
        return np.array(numbers, np.float64), "numeric"
    if letter == "M":
        if getattr(one.dtype, "tz", None) is not None:
            one = one.dt.tz_convert(None)
        moments = np.asarray(one)
        if moments.dtype == object:  # pandas' dates of pyarrow
            return _read_objects(moments, name)
        return _seconds(moments - np.datetime64(0, "s")), "date"
    if letter == "m":
        return _seconds(np.asarray(one)), "numeric"
    return _read_objects(np.asarray(one, object), name)


def _seconds(spans: np.ndarray) -> np.ndarray:
    """Time spans in seconds, with NaN where one is missing."""
    return np.asarray(spans / _SECOND, np.float64)


def _read_objects(values: np.ndarray, name: str) -> tuple[np.ndarray, ColumnKind]:
    """Read a column of Python's objects by their types."""
    known = [value for value in values.tolist() if not stands_for_none(value)]
    if any(isinstance(value, (complex, np.complexfloating)) for value in known):
        raise ValueError(f"Complex data not supported: column {name!r} has complex numbers")
    number = (Real, Decimal, np.bool_)  # numpy's other numbers are of the type Real
    if all(isinstance(value, number) for value in known):
        try:
            return _mapped(values, float, np.nan, np.float64), "numeric"
        except OverflowError:
            raise ValueError(f"column {name!r} has a number that exceeds float64") from None
    if all(isinstance(value, _DATES) for value in known):
        return _mapped(values, _since_1970, np.nan, np.float64), "date"
    for value in known:
        if not isinstance(value, (str, bytes, *number)):
            raise TypeError(
                f"column {name!r} holds {type(value).__name__}: give numbers, texts or dates (a "
                "period of pandas becomes one by .dt.to_timestamp()); the argument must be a "
                "string or a number"
            )
    return _mapped(values, _text, None, object), "categorical"


def _mapped(
    values: np.ndarray, function: Callable[[Any], Any], missing: Any, dtype: Any
) -> np.ndarray:
    found = np.empty(len(values), dtype)
    for place, value in enumerate(values.tolist()):
        found[place] = missing if stands_for_none(value) else function(value)
    return found


def stands_for_none(value: Any) -> bool:
    """Whether an object stands for a missing value."""
    if value is None or type(value).__name__ in _NO_VALUES:
        return True
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    return isinstance(value, (float, np.floating)) and bool(value != value)


def _since_1970(value: Any) -> float:
    """The seconds of a date since 1970 in UTC."""
    if isinstance(value, np.datetime64):
        return float((value - np.datetime64(0, "s")) / _SECOND)
    if not isinstance(value, dt.datetime):
        value = dt.datetime(value.year, value.month, value.day, tzinfo=_UTC)
    return float((value if value.tzinfo else value.replace(tzinfo=_UTC)).timestamp())


def _text(value: Any) -> str:
    """A category as text. Whole numbers look alike, whether their column has other ones or not."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def _numbers_of_texts(values: np.ndarray, name: str) -> np.ndarray:
    try:
        return _mapped(values, float, np.nan, np.float64)
    except ValueError:
        wrong = next(value for value in values.tolist() if not _is_number(value))
        raise ValueError(
            f"column {name!r} held numbers in fit, but could not convert string to float: {wrong!r}"
        ) from None


def _is_number(value: str | None) -> bool:
    try:
        float(value or "nan")
    except ValueError:
        return False
    return True


def _objects(values: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(values), object)
    found[:] = values
    return found
