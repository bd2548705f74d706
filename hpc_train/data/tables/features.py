"""The features of a table: how the values of its columns become the numbers that a model reads.

Their statistics come from the training split only. They are stored with the prepared table and in
each checkpoint, so that a model can read other tables.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from hpc_train.data.tables.schema import TableTask
from hpc_train.errors import DataError

UNKNOWN, MISSING_CODE, FIRST_CODE = 0, 1, 2  # codes of categories; the known ones follow
DAY = 86400.0  # seconds
LEAST_EDGE, MOST_EDGE = 1e-30, 1e37  # sizes of edges besides 0
# The largest size of an edge in columns that have values far from most others. It is an exact
# float32, and no other edge is likely to be equal to it. Embeddings that multiply a value by a
# weight would give large numbers for a larger one.
FAR_EDGE = 100.0 - 2.0**-17
DatePart = Literal["days", "month", "weekday", "hour"]
DATE_PARTS: tuple[DatePart, ...] = get_args(DatePart)
RawColumns = Mapping[str, Any]
"""Values of columns by name, each of length N. Numeric columns are float64 (N,), with NaN where a
value is missing. Dates are float64 (N,), seconds since 1970 in UTC, with NaN likewise. Categorical
columns are `Categories`, or of type object (N,): str, or None where a value is missing."""


@dataclass(frozen=True, eq=False)
class Categories:
    """The values of a categorical column, each different text once.

    Args:
        codes: place of each row's text in `values`, int32 (N,); -1 where the value is missing.
        values: the texts. All of them are different, and some may be in no row.
    """

    codes: npt.NDArray[np.int32]
    values: tuple[str, ...]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Categories:
        """Some of the rows: an array of their numbers, a mask, or a slice."""
        return Categories(self.codes[rows], self.values)

    def texts(self) -> np.ndarray:
        """The values of all rows, of type object (N,): str, or None where a value is missing."""
        found: np.ndarray = np.array([*self.values, None], object)[self.codes]
        return found


@dataclass(frozen=True, kw_only=True)
class NumericFeature:
    """A feature that is a number. The model reads (value - center) / scale, or NaN.

    Args:
        name: name of the feature: that of its column, or for a part of a date that of `part_name`.
        column: name of its column.
        part: the part of a date that it is; None for a numeric column.
        center: what is subtracted.
        scale: what is divided by, above 0.
        edges: quantiles of the scaled training values, strictly rising, two or more: the first is
            the least value and the last the largest. They are the bins of piecewise-linear
            embeddings, and say how the values are distributed. If one is FAR_EDGE away from 0,
            values outside of the edges are taken for the nearest edge.
    """

    name: str
    column: str
    part: DatePart | None = None
    center: float = 0.0
    scale: float = 1.0
    edges: tuple[float, ...] = (-1.0, 1.0)

    def values(self, columns: RawColumns) -> npt.NDArray[np.float64]:
        """The feature's scaled values, float64 (N,), with NaN where one is missing."""
        raw = columns[self.column]
        taken = raw if self.part is None else date_part(raw, self.part)
        with np.errstate(over="ignore"):
            scaled: npt.NDArray[np.float64] = (taken - self.center) / self.scale
        missing = ~np.isfinite(taken)
        if FAR_EDGE in (-self.edges[0], self.edges[-1]):
            np.clip(scaled, self.edges[0], self.edges[-1], out=scaled)
        scaled[missing | ~np.isfinite(scaled)] = np.nan
        return scaled


@dataclass(frozen=True, kw_only=True)
class CategoricalFeature:
    """A feature that is one of several categories. The model reads a code.

    The code is 0 for a category that is not listed, 1 where the value is missing, and 2 + its place
    in the list for the others.

    Args:
        name: name of the feature and of its column.
        categories: the categories of the training rows, the most frequent first, equal ones by
            value.
        shares: the share of the training rows that have each code, 2 + number of categories.
    """

    name: str
    categories: tuple[str, ...]
    shares: tuple[float, ...]

    @property
    def codes(self) -> int:
        """Number of codes."""
        return FIRST_CODE + len(self.categories)

    def values(self, columns: RawColumns) -> npt.NDArray[np.int32]:
        """The feature's codes, int32 (N,)."""
        return category_codes(columns[self.name], self.categories)


@dataclass(frozen=True, kw_only=True)
class TargetValues:
    """What is predicted.

    Args:
        task: the task; not "none".
        names: names of the target columns.
        classes: the classes of a classification in the order of their numbers, as texts; the two
            values of each label of a multilabel task are "0" and "1", and classes is empty.
        shares: the share of the training rows of each class, or of those with each label.
        center: what is subtracted from the target of a regression.
        scale: what it is then divided by.
    """

    task: TableTask
    names: tuple[str, ...]
    classes: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    center: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TableFeatures:
    """All features of a table, and its target.

    Args:
        numeric: the numeric features, in the order in which a model reads them.
        categorical: the categorical features, likewise.
        target: what is predicted; None if the table has no target.
        missing: texts that stand for a missing value in the table's files.
    """

    numeric: tuple[NumericFeature, ...]
    categorical: tuple[CategoricalFeature, ...]
    target: TargetValues | None
    missing: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the features are made of."""
        names = [one.column for one in self.numeric] + [one.name for one in self.categorical]
        return tuple(dict.fromkeys(names))

    def encode(self, columns: RawColumns) -> tuple[np.ndarray, np.ndarray]:
        """Make the numbers that a model reads.

        Returns:
            numeric: float64 (N, number of numeric features), NaN where a value is missing.
            categorical: int32 (N, number of categorical features).
        """
        count = len(next(iter(columns.values())))
        numeric = np.empty((count, len(self.numeric)))
        categorical = np.empty((count, len(self.categorical)), np.int32)
        for place, number in enumerate(self.numeric):
            numeric[:, place] = number.values(columns)
        for place, category in enumerate(self.categorical):
            categorical[:, place] = category.values(columns)
        return numeric, categorical

    def to_tree(self) -> dict[str, Any]:
        """The features as plain JSON values; `from_tree` reads them back."""
        # `dataclasses.asdict` would copy each edge by itself, which tables of many columns feel.
        return vars(self) | {
            "numeric": [vars(one) for one in self.numeric],
            "categorical": [vars(one) for one in self.categorical],
            "target": None if self.target is None else vars(self.target),
        }

    @classmethod
    def from_tree(cls, tree: Any) -> Self:
        """Make features from the JSON values of `to_tree`.

        Raises:
            DataError: the values are no features.
        """
        try:
            target = tree["target"]
            return cls(
                numeric=tuple(NumericFeature(**_tuples(one)) for one in tree["numeric"]),
                categorical=tuple(
                    CategoricalFeature(**_tuples(one)) for one in tree["categorical"]
                ),
                target=None if target is None else TargetValues(**_tuples(target)),
                missing=tuple(tree["missing"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"these are no features of a table ({error})", "prepare it again"
            ) from None


def _tuples(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in tree.items()}


def distinct_edges(scaled: npt.NDArray[np.float64], most: float = MOST_EDGE) -> tuple[float, ...]:
    """The edges of a feature's bins, strictly rising: those values that the model tells apart.

    It reads float32. Very small and very large values are brought in, so that the widths of all
    bins and their inverses are numbers of this type.

    Args:
        scaled: scaled values, float64 (N,).
        most: the largest size of an edge.
    """
    edges = np.clip(scaled, -most, most)
    edges[np.abs(edges) < LEAST_EDGE] = 0.0
    return tuple(np.unique(edges.astype(np.float32)).astype(np.float64).tolist())


def part_name(column: str, part: DatePart, columns: Container[str]) -> str:
    """The name of a part of a date: COLUMN.PART, with _ behind it if a column has that name."""
    name = f"{column}.{part}"
    while name in columns:
        name += "_"
    return name


def date_part(seconds: np.ndarray, part: DatePart) -> npt.NDArray[np.float64]:
    """A part of dates.

    Args:
        seconds: seconds since 1970 in UTC, float64 (N,); NaN where a date is missing.
        part: "days" since 1970 with their fraction, "month" from 1 to 12, "weekday" from 0 (Monday)
            to 6, or "hour" from 0 to 23.

    Returns:
        float64 (N,), NaN where a date is missing.
    """
    if part == "days":
        return seconds / DAY
    days = np.floor(seconds / DAY)
    if part == "weekday":
        return (days + 3) % 7  # 1970 began on a Thursday
    if part == "hour":
        return np.floor((seconds - days * DAY) / 3600)
    known = np.isfinite(days)
    months = np.where(known, days, 0).astype("datetime64[D]").astype("datetime64[M]")
    return np.where(known, months.astype(np.int64) % 12 + 1.0, np.nan)


def category_codes(
    values: np.ndarray | Categories, categories: Sequence[str]
) -> npt.NDArray[np.int32]:
    """The codes of categorical values, int32 (N,).

    Args:
        values: the values of N rows; or str, or None where a value is missing, of type object (N,).
        categories: the known categories.
    """
    codes: dict[str | None, int] = {one: FIRST_CODE + n for n, one in enumerate(categories)}
    codes[None] = MISSING_CODE
    if isinstance(values, Categories):
        of_values = [*(codes.get(v, UNKNOWN) for v in values.values), MISSING_CODE]
        known: npt.NDArray[np.int32] = np.array(of_values, np.int32)[values.codes]
        return known
    return np.fromiter((codes.get(v, UNKNOWN) for v in values.tolist()), np.int32, len(values))
