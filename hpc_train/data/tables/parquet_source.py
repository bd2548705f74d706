"""Rows of Parquet files, read by pyarrow in portions of whole row groups."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpc_train.data.prepare.foreign import import_pyarrow
from hpc_train.data.tables.conversion import from_arrow
from hpc_train.data.tables.schema import TableSchema
from hpc_train.data.tables.table_files import (
    BATCH_ROWS,
    SAMPLED_ROWS,
    RawRows,
    TableFile,
    TablePortion,
    WrongPolicy,
    check_names,
    kinds_read,
    opened_table,
)
from hpc_train.data.tables.wrong_rows import judged_batches
from hpc_train.errors import DataError

COLUMN_BYTES = 1 << 20  # of a column that are read at once
UNNAMED_INDEX = re.compile(r"__index_level_\d+__")  # as pandas calls it
LARGEST_GROUP = 1 << 40  # rows or bytes; a footer that claims more is damaged


@contextmanager
def _opened(file: TableFile) -> Iterator[Any]:
    """Open a Parquet file.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    pa = import_pyarrow()
    import pyarrow.parquet

    with opened_table(file) as raw:
        try:
            with pyarrow.parquet.ParquetFile(
                raw, buffer_size=COLUMN_BYTES, pre_buffer=False, page_checksum_verification=True
            ) as opened:
                yield opened
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise DataError(
                f"{file.path} cannot be read as Parquet ({why})", "copy it again, or leave it out"
            ) from None


def parquet_columns(file: TableFile) -> list[str]:
    """The names of a Parquet file's columns.

    Raises:
        DataError: it cannot be read.
    """
    with _opened(file) as opened:
        return _names(file, opened)


def _names(file: TableFile, opened: Any) -> list[str]:
    names = list(opened.schema_arrow.names)
    check_names(file, names, names)
    return names


def unnamed_index(file: TableFile) -> list[str]:
    """The columns of a Parquet file that are the index of a pandas table and have no own name.

    Raises:
        DataError: the file cannot be read.
    """
    with _opened(file) as opened:
        about = (opened.schema_arrow.metadata or {}).get(b"pandas", b"{}")
        try:
            index = [*json.loads(about).get("index_columns", ())]
        except (ValueError, TypeError, AttributeError, RecursionError):
            return []
        return [n for n in opened.schema_arrow.names if UNNAMED_INDEX.fullmatch(n) and n in index]


def _groups(file: TableFile, opened: Any) -> tuple[list[int], list[int]]:
    """The numbers of rows and of bytes of all row groups."""
    about = opened.metadata
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    rows = [group.num_rows for group in groups]
    nbytes = [group.total_byte_size for group in groups]
    if not all(0 <= number <= LARGEST_GROUP for number in (*rows, *nbytes)):
        raise DataError(f"{file.path} has a damaged footer", "copy it again, or leave it out")
    return rows, nbytes


def cut_parquet(file: TableFile, nbytes: int) -> list[TablePortion]:
    """The portions of a Parquet file: row groups that have about as many bytes together.

    Raises:
        DataError: the file cannot be read.
    """
    with _opened(file) as opened:
        sizes = _groups(file, opened)[1]
    portions, begin, total = [], 0, 0
    for number, size in enumerate(sizes):
        total += size
        if total >= nbytes or number + 1 == len(sizes):
            portions.append(TablePortion(file, begin, number + 1))
            begin, total = number + 1, 0
    return portions


def read_parquet_rows(
    portion: TablePortion, schema: TableSchema, wrong: WrongPolicy, texts: Collection[str]
) -> Iterator[RawRows]:
    """The rows of a portion of a Parquet file. `sources.read_rows` describes it."""
    file = portion.file
    wanted = kinds_read(schema, texts)
    with _opened(file) as opened:
        check_names(file, _names(file, opened), [column.name for column in schema.columns])
        rows = _groups(file, opened)[0]
        if portion.end > len(rows):
            raise DataError(f"{file.path} has lost row groups", "prepare the table again")
        before, number = sum(rows[: portion.begin]), 0
        groups = [*range(portion.begin, portion.end)]
        names = [*dict.fromkeys(name for name, _ in wanted.values())]
        for batch in _batches(opened, groups, names, BATCH_ROWS):
            columns = {}
            for key, (name, kind) in wanted.items():
                try:
                    columns[key] = from_arrow(batch.column(name), kind, schema.missing)
                except DataError as error:
                    cause = f"{file.path}: column {name!r} {error.cause}"
                    raise DataError(cause, error.remedy) from None
            numbers = np.arange(number, number + batch.num_rows)
            number += batch.num_rows
            yield from judged_batches(
                columns, numbers, wrong, lambda row: f"{file.path}, row {before + row + 1}"
            )
        if number != sum(rows[portion.begin : portion.end]):
            raise DataError(f"{file.path} has other rows than its footer says", "copy it again")


def _batches(opened: Any, groups: list[int], names: list[str], rows: int) -> Iterator[Any]:
    if groups and names:
        yield from opened.iter_batches(
            batch_size=rows, row_groups=groups, columns=names, use_threads=False
        )


def sample_parquet(file: TableFile) -> tuple[list[str], list[Any]]:
    """Some rows of a Parquet file: the first ones of its first, middle and last row groups.

    Returns:
        The names of its columns, and Arrow batches of rows.

    Raises:
        DataError: the file cannot be read.
    """
    with _opened(file) as opened:
        names, count = _names(file, opened), opened.num_row_groups
        groups = sorted({0, count // 2, count - 1}) if count else []
        found = [next(_batches(opened, [one], names, SAMPLED_ROWS), None) for one in groups]
    return names, [batch for batch in found if batch is not None]
