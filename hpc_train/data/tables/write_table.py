"""Write the rows of a table into a shard that other programs can read, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpc_train.data.tables.features import RawColumns, TableFeatures
from hpc_train.data.tables.table_manifest import TableShard, row_type
from hpc_train.data.tables.targets import encode_target
from hpc_train.data.write import check_written, write_datasets

ABOUT = {
    "schema": "rows: scaled numeric features, codes of categorical ones, target, weight; "
    "manifest.json says which"
}


def encode_rows(
    features: TableFeatures,
    columns: RawColumns,
    weight: np.ndarray | None,
    out: np.ndarray,
) -> None:
    """Make the rows of a shard.

    Args:
        features: the table's features.
        columns: the values of N rows, whose targets are known.
        weight: their weights, of mean 1 in the training split, (N,); None: all are 1.
        out: the rows to fill, (N,) of the type `row_type`.
    """
    numeric, categorical = features.encode(columns)
    largest = np.finfo(np.float32).max
    target, _ = encode_target(features.target, columns)
    for name, values in (("numeric", numeric), ("categorical", categorical), ("target", target)):
        if name in (out.dtype.names or ()):
            whole = out[name].dtype.kind == "i"
            fitting = values if whole else np.clip(values, -largest, largest)
            out[name] = fitting.reshape(out[name].shape)
    out["weight"] = 1.0 if weight is None else weight[:, None]


def write_table_shard(path: Path, rows: np.ndarray, features: TableFeatures) -> TableShard:
    """Write one shard, then read it back and compare.

    Args:
        path: a new file, in a folder that is not published yet.
        rows: its rows (N,), of the type `row_type`.
        features: the table's features.

    Raises:
        DataError: the file has other rows than were written.
        OSError: the file cannot be written.
    """
    offsets, digest = write_datasets(path, {"rows": rows}, ABOUT)
    size = path.stat().st_size
    shard = TableShard(path.name, size, len(rows), offsets["rows"], offsets["hashes"], digest)
    check_written(path, shard, f"V{row_type(features).itemsize}")
    return shard
