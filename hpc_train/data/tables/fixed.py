"""The features of a table from the statistics of its training rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from hpc_train.data.tables.far_values import FarValues
from hpc_train.data.tables.features import (
    DATE_PARTS,
    FAR_EDGE,
    MOST_EDGE,
    CategoricalFeature,
    NumericFeature,
    TableFeatures,
    TargetValues,
    distinct_edges,
    part_name,
)
from hpc_train.data.tables.row_files import read_array
from hpc_train.data.tables.schema import SHOWN_NAMES, TableSchema
from hpc_train.data.tables.statistics import (
    NumberSummary,
    add_counts,
    check_classes,
    ranked,
    smallest,
)
from hpc_train.data.tables.targets import class_order, classes_alike
from hpc_train.errors import DataError

logger = logging.getLogger(__name__)

Scaling = Literal["standard", "robust"]
SAMPLES_TOGETHER = 64  # features whose samples are in memory, each of half a MiB
COUNTS_TOGETHER = 4  # columns whose counts are in memory, each of some MiB


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """How features are made of columns.

    Args:
        max_categories: most categories of a column that get a code of their own, the most frequent
            ones.
        bins: most bins between the edges of a numeric feature.
        scaling: "standard" subtracts the mean and divides by the standard deviation; "robust" takes
            the median and the distance of the quartiles, which outliers do not change.
    """

    max_categories: int = 1000
    bins: int = 48
    scaling: Scaling = "standard"


def candidate_features(schema: TableSchema) -> list[NumericFeature]:
    """The numeric features that a table may get, unscaled."""
    found, names = [], {column.name for column in schema.features}
    for column in schema.features:
        if column.kind == "numeric":
            found.append(NumericFeature(name=column.name, column=column.name))
        elif column.kind == "date":
            found += [
                NumericFeature(
                    name=part_name(column.name, part, names), column=column.name, part=part
                )
                for part in DATE_PARTS
            ]
    return found


def scaled_feature(
    feature: NumericFeature,
    summary: NumberSummary,
    sample: npt.NDArray[np.float64],
    options: FeatureOptions,
    far: FarValues,
) -> NumericFeature | None:
    """A feature with its center, scale and edges.

    Args:
        feature: the unscaled feature.
        summary: what is known of its training values.
        sample: a sample of these values without missing ones, float64 (N,).
        options: how features are made.
        far: gets the values that are far from most others.

    Returns:
        The feature; None if it is the same in all training rows.
    """
    if summary.least == summary.most:
        if not summary.count or not summary.missing:
            return None
        return replace(feature, center=summary.least)
    center, scale = summary.mean, summary.std
    if options.scaling == "robust" and len(sample):
        with np.errstate(over="ignore", invalid="ignore"):
            low, center, high = np.quantile(sample, [0.25, 0.5, 0.75]).tolist()
        scale = high - low or scale
    scale = scale or summary.most - summary.least  # the squares of tiny numbers are 0
    values = np.append(sample, [summary.least, summary.most])  # a sample may lack these two
    center, scale = far.scale(feature.name, values, center, scale)
    most = FAR_EDGE if feature.name in far.found else MOST_EDGE
    levels = np.linspace(0, 1, options.bins + 1)[1:-1]
    with np.errstate(over="ignore", invalid="ignore"):
        inner = np.quantile(sample, levels) if len(sample) else np.empty(0)
        every = np.array([summary.least, *inner[np.isfinite(inner)], summary.most])
        edges = distinct_edges((every - center) / scale, most)
    if len(edges) < 2:
        return None
    return replace(feature, center=center, scale=scale, edges=edges)


def fix_features(
    schema: TableSchema,
    options: FeatureOptions,
    trees: Sequence[Any],
    opened: Callable[[int], BinaryIO],
    summaries: Sequence[NumberSummary],
) -> TableFeatures:
    """Make the features of a table.

    Args:
        schema: its schema.
        options: how features are made.
        trees: what `PortionStatistics.write` returned, for all portions in their order.
        opened: opens the file that it wrote for a portion.
        summaries: what `summaries_of` makes of both.

    Raises:
        DataError: no feature differs between training rows, or the target cannot be learned.
    """
    target = _target(schema, trees, summaries[len(candidate_features(schema)) :])
    found: dict[str, NumericFeature | CategoricalFeature | None] = {}
    candidates, far = candidate_features(schema), FarValues()
    for first in range(0, len(candidates), SAMPLES_TOGETHER):
        places = range(first, min(first + SAMPLES_TOGETHER, len(candidates)))
        for place, sample in zip(places, _samples(trees, opened, places), strict=True):
            candidate = candidates[place]
            summary = summaries[place]
            found[candidate.name] = scaled_feature(candidate, summary, sample, options, far)
    far.warn()
    names = [column.name for column in schema.features if column.kind == "categorical"]
    for first in range(0, len(names), COUNTS_TOGETHER):
        places = range(first, min(first + COUNTS_TOGETHER, len(names)))
        for place, (counts, missing) in zip(places, _counts(trees, opened, places), strict=True):
            name, rows = names[place], sum(tree["rows"][0] for tree in trees)
            found[name] = _categorical(name, counts, missing, rows, options)
    dropped = [name for name, made in found.items() if made is None]
    if dropped:
        shown = ", ".join(dropped[:SHOWN_NAMES]) + ", ..." * (len(dropped) > SHOWN_NAMES)
        logger.info("no features, as all training rows have the same value: %s", shown)
    if len(dropped) == len(found):
        raise DataError(
            "all training rows have the same values", "give more rows, or other columns"
        )
    return TableFeatures(
        numeric=tuple(one for one in found.values() if isinstance(one, NumericFeature)),
        categorical=tuple(one for one in found.values() if isinstance(one, CategoricalFeature)),
        target=target,
        missing=schema.missing,
    )


def _samples(
    trees: Sequence[Any], opened: Callable[[int], BinaryIO], places: Sequence[int]
) -> list[npt.NDArray[np.float64]]:
    """The samples of some candidate features, without missing values."""
    hashes = [np.empty(0, np.uint64)]
    values = [[np.empty(0)] for _ in places]
    for number, tree in enumerate(trees):
        with opened(number) as file:
            hashes.append(read_array(file, tree["hashes"]))
            begins = read_array(file, tree["samples"]).tolist()
            for parts, place in zip(values, places, strict=True):
                parts.append(read_array(file, begins[place]))
    kept = smallest(np.concatenate(hashes))
    samples = (np.concatenate(parts)[kept] for parts in values)
    return [sample[~np.isnan(sample)] for sample in samples]


def _counts(
    trees: Sequence[Any], opened: Callable[[int], BinaryIO], places: Sequence[int]
) -> list[tuple[dict[str, int], int]]:
    """The counts of the texts of some categorical columns, and how many are missing."""
    found: list[tuple[dict[str, int], int]] = [({}, 0) for _ in places]
    for number, tree in enumerate(trees):
        with opened(number) as file:
            rows = read_array(file, tree["texts"]).tolist()
            found = [
                (add_counts(counts, file, rows[place][0]), missing + rows[place][1])
                for (counts, missing), place in zip(found, places, strict=True)
            ]
    return found


def _categorical(
    name: str, counts: dict[str, int], missing: int, rows: int, options: FeatureOptions
) -> CategoricalFeature | None:
    if rows == missing or (len(counts) == 1 and not missing):
        return None
    categories = ranked(counts, options.max_categories)
    known = [counts[one] for one in categories]
    unknown = rows - missing - sum(known)
    shares = [one / max(1, rows) for one in (unknown, missing, *known)]
    return CategoricalFeature(name=name, categories=tuple(categories), shares=tuple(shares))


def _target(
    schema: TableSchema, trees: Sequence[Any], summaries: Sequence[NumberSummary]
) -> TargetValues | None:
    rows = sum(tree["rows"][0] for tree in trees)
    if schema.task == "none":
        return None
    if schema.task == "classification":
        return _classes(schema, trees, rows)
    if schema.task == "multilabel":
        shares = tuple(one.mean for one in summaries[: len(schema.targets)])
        return TargetValues(task="multilabel", names=schema.targets, shares=shares)
    one = summaries[0]
    if not math.isfinite(one.std):
        largest = max(one.least, one.most, key=abs)
        raise DataError(
            f"the numbers of {schema.targets[0]} are so large, up to {largest:g}, that their "
            "standard deviation is no number",
            "divide them",
        )
    if one.std == 0 and one.least < one.most:
        raise DataError(
            f"the numbers of {schema.targets[0]} are so small that their standard deviation is 0",
            "multiply them",
        )
    return TargetValues(
        task="regression", names=schema.targets, center=one.mean, scale=one.std or 1.0
    )


def _classes(schema: TableSchema, trees: Sequence[Any], rows: int) -> TargetValues:
    counts: dict[str, int] = {}
    [name] = schema.targets
    for tree in trees:
        for text, number in tree["classes"][0].items():
            counts[text] = counts.get(text, 0) + number
        check_classes(name, counts)
    if len(counts) < 2:
        raise DataError(
            f"all training rows have the target {name} = {next(iter(counts))}",
            "give rows with two classes or more",
        )
    classes = class_order(counts)
    if groups := classes_alike(classes):
        told = "; ".join(" and ".join(map(repr, texts)) for texts in groups[:SHOWN_NAMES])
        logger.warning(
            "the target %s has classes that differ only in how they are written: %s; if they are "
            "the same, write them alike in all files",
            name,
            told,
        )
    shares = tuple(counts[one] / rows for one in classes)
    return TargetValues(task="classification", names=(name,), classes=classes, shares=shares)
