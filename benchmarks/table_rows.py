"""A made table of 20 columns with as many rows as wanted, as Parquet or CSV, in bounded memory.

Row number n is the same in both formats, and however many rows there are. There are 13 numeric
columns, four of them with missing values, a date, 5 categorical columns with 2 to 3000 categories,
and the class to predict, which depends on some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

CHUNK = 100_000  # rows that are made at once; a row group of Parquet
FILE_ROWS = 5_000_000
NUMBERS = 13
MISSING = (0.05, 0.1, 0.2, 0.4)  # shares of the first numeric columns
CATEGORIES = {"sex": 2, "month_paid": 12, "branch": 100, "town": 1000, "device": 3000}
FIRST_DATE, DATES = 1_420_070_400, 10 * 365 * 86_400  # seconds: from 2015-01-01, ten years
TARGET = "bought"
FORMATS = ("parquet", "csv")


def chunk(number: int) -> pa.Table:
    """Rows number * CHUNK to (number + 1) * CHUNK - 1 of the table."""
    effects = np.random.default_rng(20)
    draws = np.random.default_rng([20, number])
    x = draws.standard_normal((NUMBERS, CHUNK)).round(3)
    x[NUMBERS // 2 :] = np.exp(x[NUMBERS // 2 :]).round(2)
    logit = x[4] * x[5] + 0.8 * x[6] - 1
    columns: dict[str, Any] = {}
    for place, values in enumerate(x):
        missing = None
        if place < len(MISSING):
            missing = draws.random(CHUNK) < MISSING[place]
            logit += np.where(missing, 0.5, 0.4 * values)
        columns[f"n{place}"] = pa.array(values, mask=missing)
    seconds = FIRST_DATE + draws.integers(DATES, size=CHUNK)
    columns["opened"] = pa.array(seconds, pa.int64()).cast(pa.timestamp("s"))
    for name, count in CATEGORIES.items():
        codes = (count * draws.random(CHUNK) ** 2).astype(np.int32)  # the first are frequent
        logit += 0.5 * effects.standard_normal(count)[codes]
        names = pa.array([f"{name}-{n}" for n in range(count)])
        columns[name] = pa.DictionaryArray.from_arrays(codes, names).cast(pa.string())
    drawn = draws.random(CHUNK) < 1 / (1 + np.exp(-logit))
    columns[TARGET] = pa.array(drawn.astype(np.int64))
    return pa.table(columns)


def write_rows(folder: Path, rows: int, form: str) -> list[Path]:
    """Write the first rows of the table into files of FILE_ROWS rows.

    Args:
        folder: is made. If it has a file `complete` of an earlier call, nothing is written.
        rows: number of rows.
        form: one of FORMATS.

    Returns:
        The files, in the order of their rows.
    """
    paths = [folder / f"part-{n:04d}.{form}" for n in range(-(-rows // FILE_ROWS))]
    if (folder / "complete").exists():
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    opened: Callable[..., Any] = pa.csv.CSVWriter if form == "csv" else pa.parquet.ParquetWriter
    for number, path in enumerate(paths):
        first, last = number * FILE_ROWS, min((number + 1) * FILE_ROWS, rows)
        with ExitStack() as held:
            writer: Any = None
            for begin in range(first, last, CHUNK):
                made = chunk(begin // CHUNK)[: last - begin]
                if writer is None:
                    writer = held.enter_context(opened(str(path), made.schema))
                writer.write_table(made)
    (folder / "complete").touch()
    return paths
