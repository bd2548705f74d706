"""Wrong rows of a batch: the first one ends the program, or all are left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpc_train.data.tables.conversion import CAUSES, ColumnValues, shortened
from hpc_train.data.tables.table_files import BATCH_ROWS, RawRows, WrongPolicy
from hpc_train.errors import DataError

MEND_VALUE = (
    "mend the file, leave such rows out by --wrong_rows count, or prepare the table with another "
    "kind of this column in its schema"
)


class WrongValue(NamedTuple):
    """The first wrong value of a batch: its row in the batch, its column and what is said of it."""

    row: int
    column: str
    what: str


def first_wrong(columns: Mapping[str, ColumnValues]) -> WrongValue | None:
    """The first wrong value in the order of rows, then of columns; None: all are right."""
    found: WrongValue | None = None
    for name, column in columns.items():
        if column.causes is None:
            continue
        row = int(np.flatnonzero(column.causes)[0])
        if found is None or row < found.row:
            assert column.codes is not None
            text = shortened(column.given[column.codes[row]])
            found = WrongValue(row, name, f"{text} {CAUSES[int(column.causes[row])]}")
    return found


def right_batches(
    columns: Mapping[str, ColumnValues],
    numbers: npt.NDArray[np.int64],
    where: Callable[[int], str],
    lost: Mapping[str, int],
) -> Iterator[RawRows]:
    """Batches of the rows whose values are all right; at least one batch, which may be empty.

    Args:
        columns: the values of N rows.
        numbers: the rows' numbers, int64 (N,).
        where: says where the row of a number is.
        lost: how many other rows were left out for each cause.
    """
    causes = np.zeros(len(numbers), np.int8)  # the cause of each row's first wrong value
    for column in columns.values():
        if column.causes is not None:
            causes = np.where(causes == 0, column.causes, causes)
    counts = Counter({cause: count for cause, count in lost.items() if count})
    counts.update(f"a value {CAUSES[cause]}" for cause in causes[causes > 0].tolist())
    right = np.flatnonzero(causes == 0)
    whole = len(right) == len(numbers)
    for begin in range(0, max(len(right), 1), BATCH_ROWS):
        some: Any = slice(begin, begin + BATCH_ROWS)
        some = some if whole else right[some]
        raw = {name: column.raw[some] for name, column in columns.items()}
        yield RawRows(raw, numbers[some], where, {} if begin else dict(counts))


def judged_batches(
    columns: Mapping[str, ColumnValues],
    numbers: npt.NDArray[np.int64],
    wrong: WrongPolicy,
    where: Callable[[int], str],
) -> Iterator[RawRows]:
    """Batches of right rows, or an error that names the first wrong one.

    Args:
        columns: the values of N rows.
        numbers: the rows' numbers, int64 (N,).
        wrong: "raise" or "count".
        where: says where the row of a number is.

    Raises:
        DataError: a row is wrong, and `wrong` is "raise".
    """
    if wrong == "raise" and (value := first_wrong(columns)) is not None:
        row = where(int(numbers[value.row]))
        raise DataError(f"{row}, column {value.column!r}: {value.what}", MEND_VALUE)
    yield from right_batches(columns, numbers, where, {})
