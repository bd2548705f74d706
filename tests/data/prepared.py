"""Tables for tests, as csv files, and as folders that were prepared from them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.data.tables.infer import infer_schema
from hpc_train.data.tables.prepare_table import prepare_table
from hpc_train.data.tables.sources import list_tables
from hpc_train.data.tables.splits import SPLIT_SEED, as_shares, portion_key, row_hashes
from hpc_train.data.tables.table_manifest import TableManifest
from hpc_train.data.tables.table_request import TableOptions, TableRequest, table_request


def made_table(rows: int, seed: int = 0) -> dict[str, list[Any]]:
    """Columns of a table with all kinds of values, some of them missing."""
    random = np.random.default_rng(seed)
    number = random.normal(100, 5, rows).round(6).tolist()
    words = random.choice(["red", "green", "blue", 'größe, "x"'], rows).tolist()
    for place in random.choice(rows, rows // 10, replace=False).tolist():
        number[place] = words[place] = ""
    days = (np.datetime64("2024-01-30") + random.integers(0, 400, rows)).astype(str).tolist()
    return {
        "number": number,
        "count": random.integers(0, 20, rows).tolist(),
        "word": words,
        "day": days,
        "who": [f"person {n}" for n in random.integers(0, 30, rows)],
        "when": random.permutation(rows).tolist(),
        "label": random.choice(["yes", "no", "perhaps"], rows).tolist(),
        "value": random.normal(3, 2, rows).round(6).tolist(),
    }


def write_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Write a csv file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_parts(folder: Path, columns: dict[str, list[Any]], parts: int) -> Path:
    """Write a table as several csv files."""
    rows = len(columns["number"])
    bounds = [rows * n // parts for n in range(parts + 1)]
    for n in range(parts):
        own = {name: values[bounds[n] : bounds[n + 1]] for name, values in columns.items()}
        write_csv(folder / f"{n:03d}.csv", own)
    return folder


def request_of(
    path: Path, out: Path, options: TableOptions | None = None, **roles: Any
) -> TableRequest:
    """A request with the schema that is found in the files."""
    roles = {"targets": ["label"], **roles}
    return table_request([path], out, infer_schema(list_tables([path]), **roles), options)


def prepared(path: Path, out: Path, **how: Any) -> TableManifest:
    """Prepare files in this process."""
    return prepare_table(request_of(path, out, **how))


def held_out(name: str, rows: int, validation: float) -> np.ndarray:
    """Which rows of a small csv file are held out if it is prepared alone, bool (rows,)."""
    numbers = np.arange(rows)
    return as_shares(row_hashes(portion_key(name, 0), numbers, SPLIT_SEED)) < validation


def seen(folder: Path) -> dict[str, bytes]:
    """What is in a data folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
