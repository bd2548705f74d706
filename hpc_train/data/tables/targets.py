"""Targets of a table as the numbers that a loss reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from hpc_train.data.tables.conversion import TRUTH, merged_categories
from hpc_train.data.tables.features import (
    FIRST_CODE,
    Categories,
    RawColumns,
    TargetValues,
    category_codes,
)
from hpc_train.data.tables.splits import is_missing


def class_text(value: float) -> str:
    """The text of a class that is a number: without a point if it is a whole one."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def class_texts(values: np.ndarray | Categories) -> Categories:
    """The classes of rows as texts.

    Args:
        values: float64 (N,), or texts.
    """
    if isinstance(values, Categories):
        return values
    different, codes = np.unique(values, return_inverse=True)
    finite = np.isfinite(different)
    places = np.where(finite, finite.cumsum() - 1, -1).astype(np.int32)
    return Categories(places[codes], tuple(class_text(one) for one in different[finite].tolist()))


def class_order(texts: Iterable[str]) -> tuple[str, ...]:
    """Classes in the order of their numbers: by value if all of them are numbers, else by text."""
    every = sorted(texts)
    with suppress(ValueError):
        return tuple(sorted(every, key=float))
    return tuple(every)


def classes_alike(texts: Iterable[str]) -> list[list[str]]:
    """Which texts differ only in case, in blanks around them, or in how a number is written."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key = text.strip().casefold()
        with suppress(ValueError):
            key = class_text(float(key))
        found.setdefault(key, []).append(text)
    return [group for group in found.values() if len(group) > 1]


def truth_as_classes(values: np.ndarray | Categories, classes: Sequence[str]) -> Categories:
    """The classes of rows, with truth values spelled as the known classes are.

    A csv file's text stays as it is, such as true, but a truth value of Parquet is called True.

    Args:
        values: float64 (N,), or texts.
        classes: the known classes.
    """
    given = class_texts(values)
    known = {text.lower(): text for text in classes if text.lower() in TRUTH}
    own = {*known.values()}
    texts = [
        text if text in own else known.get(text.strip().lower(), text) for text in given.values
    ]
    return merged_categories(texts, given.codes)


def encode_target(
    target: TargetValues | None, columns: RawColumns
) -> tuple[np.ndarray, npt.NDArray[np.bool_]]:
    """Make the numbers that a loss reads.

    Args:
        target: what is predicted; None: nothing.
        columns: the values of N rows.

    Returns:
        values: int64 (N,) class numbers, or float64 (N,) of scaled values, or float64 (N, labels)
            of 0 and 1, or float64 (N, 0).
        known: which rows have a target that can be learned, bool (N,): it is not missing, and of a
            known class.
    """
    if target is None:
        count = len(next(iter(columns.values())))
        return np.empty((count, 0)), np.ones(count, bool)
    if target.task == "classification":
        codes = category_codes(class_texts(columns[target.names[0]]), target.classes)
        return codes.astype(np.int64) - FIRST_CODE, codes >= FIRST_CODE
    every = np.stack([columns[name] for name in target.names], 1)
    known = np.logical_and.reduce([~is_missing(columns[name]) for name in target.names])
    if target.task == "multilabel":
        return every, known
    return (every[:, 0] - target.center) / target.scale, known
