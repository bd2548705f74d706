"""Makes the features of a table in memory: their statistics are exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hpc_train.data.tables.far_values import FarValues
from hpc_train.data.tables.features import (
    DATE_PARTS,
    FAR_EDGE,
    FIRST_CODE,
    MISSING_CODE,
    MOST_EDGE,
    CategoricalFeature,
    DatePart,
    NumericFeature,
    RawColumns,
    TableFeatures,
    TargetValues,
    date_part,
    distinct_edges,
    part_name,
)
from hpc_train.data.tables.schema import ColumnKind

BINS = 48  # most bins between the edges of a numeric feature
LEAST_BINS, ROWS_OF_BIN = 2, 100  # of a table with few rows
MAX_CATEGORIES = 10_000  # of a categorical feature; others are unknown


def fit_features(
    columns: RawColumns,
    kinds: Mapping[str, ColumnKind],
    target: TargetValues | None,
    far: FarValues | None = None,
) -> TableFeatures:
    """Make the features of the training rows.

    A date becomes one numeric feature for each of its parts that has several values. A numeric
    feature has at most one bin for 100 rows, but 2 at least and 48 at most: few rows in a bin would
    be learned by heart. A categorical feature has the most frequent categories of a column.

    Args:
        columns: the columns of the training rows.
        kinds: what each column holds, in the order in which a model reads the features.
        target: what is predicted.
        far: gets the values that are far from most others.
    """
    far = far or FarValues()
    rows = max((len(values) for values in columns.values()), default=0)
    bins = min(max(LEAST_BINS, rows // ROWS_OF_BIN), BINS)
    numeric: list[NumericFeature] = []
    categorical: list[CategoricalFeature] = []
    for name, kind in kinds.items():
        if kind == "numeric":
            numeric.append(fit_numeric(name, name, None, columns[name], bins, far))
        elif kind == "categorical":
            categorical.append(fit_categorical(name, columns[name], MAX_CATEGORIES))
        elif kind == "date":
            numeric += _fit_date(name, columns, bins, far)
    return TableFeatures(numeric=tuple(numeric), categorical=tuple(categorical), target=target)


def _fit_date(name: str, columns: RawColumns, bins: int, far: FarValues) -> list[NumericFeature]:
    found = []
    for part in DATE_PARTS:
        values = date_part(columns[name], part)
        known = values[np.isfinite(values)]
        if part == "days" or (len(known) and known.min() < known.max()):
            own = part_name(name, part, columns)
            found.append(fit_numeric(own, name, part, values, bins, far))
    return found


def fit_numeric(
    name: str,
    column: str,
    part: DatePart | None,
    values: np.ndarray,
    bins: int = BINS,
    far: FarValues | None = None,
) -> NumericFeature:
    """Make a numeric feature of mean 0 and standard deviation 1, with quantiles as edges.

    Values that are far from most others may give it another mean (`FarValues`).

    Args:
        name: name of the feature.
        column: name of its column.
        part: the part of a date that it is; None for a numeric column.
        values: its values, float64 (N,). Those that are not finite are missing.
        bins: largest number of bins.
        far: gets the values that are far from most others.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return NumericFeature(name=name, column=column, part=part)
    least, most = float(known.min()), float(known.max())
    # Half of the range, so that no sum overflows.
    half = most / 2 - least / 2
    constant = NumericFeature(name=name, column=column, part=part, center=least)
    if not half:
        return constant
    shrunk = (known / 2 - least / 2) / half
    center, scale = 2 * (least / 2 + half * float(shrunk.mean())), half * (2 * float(shrunk.std()))
    if not scale:
        return constant
    far = far or FarValues()
    center, scale = far.scale(name, known, center, scale)
    most = FAR_EDGE if name in far.found else MOST_EDGE
    with np.errstate(over="ignore"):
        scaled = np.clip((known - center) / scale, -most, most)
    edges = distinct_edges(np.quantile(scaled, np.linspace(0.0, 1.0, bins + 1)), most)
    if len(edges) < 2:
        return constant
    return replace(constant, center=center, scale=scale, edges=edges)


def fit_categorical(
    name: str, values: np.ndarray, max_categories: int = MAX_CATEGORIES
) -> CategoricalFeature:
    """Make a categorical feature.

    Args:
        name: name of the feature and of its column.
        values: str, or None where a value is missing; of type object (N,).
        max_categories: largest number of categories.
    """
    counts = Counter(values.tolist())
    missing = counts.pop(None, 0)
    ordered = sorted(counts, key=lambda value: (-counts[value], value))[:max_categories]
    codes = np.zeros(FIRST_CODE + len(ordered))
    codes[MISSING_CODE] = missing
    codes[FIRST_CODE:] = [counts[value] for value in ordered]
    codes[0] = len(values) - codes.sum()
    shares = codes / max(1, len(values))
    return CategoricalFeature(name=name, categories=tuple(ordered), shares=tuple(shares.tolist()))
