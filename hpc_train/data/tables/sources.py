"""Reads tables of any format: lists their files, cuts these into portions, and reads their rows.

The portions depend on the files and the options only, so any number of ranks reads the same. One
rank lists, infers and cuts, and tells the others. Each portion is then read by any one rank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.data.prepare.inputs import COMPRESSED, each_once, files_at, reading_from
from hpc_train.data.tables.array_source import array_columns, cut_arrays, read_array_rows
from hpc_train.data.tables.csv_source import count_quotes as count_quotes
from hpc_train.data.tables.csv_source import csv_columns, cut_csv, read_csv_rows
from hpc_train.data.tables.parquet_source import cut_parquet, parquet_columns, read_parquet_rows
from hpc_train.data.tables.schema import TableSchema
from hpc_train.data.tables.table_files import (
    PORTION_BYTES,
    RawRows,
    TableFile,
    TableFormat,
    TablePortion,
    WrongPolicy,
)
from hpc_train.errors import DataError, plural

logger = logging.getLogger(__name__)

FORMATS: dict[str, TableFormat] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".npz": "npz",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
}


def list_tables(paths: Sequence[str | Path], *, tell: bool = False) -> list[TableFile]:
    """The files of a table among files and in folders, in the order of their paths.

    In folders, files with other endings than those of tables are left out, and so is what has a
    name with a dot at its beginning. A file to which several paths lead is there once. One rank
    calls it.

    Args:
        paths: files and folders.
        tell: whether to log how many files were left out.

    Raises:
        DataError: a path does not exist or is no table, a folder cannot be read, or there is no
            file.
    """
    found: dict[Path, TableFormat] = {}
    skipped = 0
    for given in map(Path, paths):
        for path in sorted(files_at(given, "a table")):
            form = _format(path)
            if form is not None:
                found[path] = form
            elif path != given:
                skipped += 1
            else:
                raise DataError(
                    f"{given} is not one of {', '.join(FORMATS)}",
                    "name it after its format; .csv and .tsv may end with .gz or .zst, too",
                )
    if not found:
        raise DataError("no file of a table was found", f"give files with {', '.join(FORMATS)}")
    if skipped and tell:
        told = plural(
            skipped, "file that is no table by its name", "files that are no tables by their names"
        )
        logger.info("skipped %s", told)
    return [_listed(path, found[path]) for path in each_once(found, tell=tell)]


def _format(path: Path) -> TableFormat | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        form = FORMATS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return form if form == "csv" else None
    return FORMATS.get(suffixes[-1]) if suffixes else None


def _listed(path: Path, form: TableFormat) -> TableFile:
    with reading_from(str(path)):
        about = path.stat()
    return TableFile(str(path), about.st_size, about.st_mtime_ns, form)


def table_columns(file: TableFile) -> list[str]:
    """The names of a file's columns, in its order. Any rank may call it.

    Raises:
        DataError: the file cannot be read, or has a column without a name or two with one name.
        SetupError: a library is missing.
        UserError: the file is HDF5, MPI runs, and `start_workers` was not called before.
    """
    if file.format == "csv":
        return csv_columns(file)[0]
    return parquet_columns(file) if file.format == "parquet" else array_columns(file)


def cut_tables(
    files: Sequence[TableFile], *, quoted_newlines: bool = True, nbytes: int = PORTION_BYTES
) -> list[TablePortion]:
    """Cut files into portions, in the order of the files. One rank calls it.

    If a quoted field of a csv file may have line ends, the portions are not ready: `count_quotes`
    has to see each of them, and `settle_quotes` what it has counted.

    Args:
        files: the files.
        quoted_newlines: whether a quoted field of a csv file may have line ends.
        nbytes: about how many bytes a portion has.

    Raises:
        DataError: a file cannot be read.
        SetupError: a library is missing.
        UserError: a file is HDF5, MPI runs, and `start_workers` was not called before.
    """
    portions: list[TablePortion] = []
    for file in files:
        if file.format == "csv":
            portions += cut_csv(file, nbytes, quoted_newlines=quoted_newlines)
        elif file.format == "parquet":
            portions += cut_parquet(file, nbytes)
        else:
            portions += cut_arrays(file, nbytes)
    return portions


def settle_quotes(portions: Sequence[TablePortion], counts: Sequence[int]) -> list[TablePortion]:
    """Say of each portion whether it begins inside quotes. It is pure; any rank may call it.

    Args:
        portions: all portions in the order of `cut_tables`.
        counts: what `count_quotes` returns for each.
    """
    settled: list[TablePortion] = []
    inside, last = False, None
    for portion, count in zip(portions, counts, strict=True):
        inside = inside and portion.file == last
        settled.append(replace(portion, inside=inside))
        inside, last = inside ^ bool(count % 2), portion.file
    return settled


def read_rows(
    portion: TablePortion,
    schema: TableSchema,
    wrong: WrongPolicy = "raise",
    texts: Collection[str] = (),
) -> Iterator[RawRows]:
    """The rows of a portion, in the order of the file. Any rank may call it.

    A csv file's record belongs to the portion in which it begins, so all portions together have
    each record once. A portion is streamed: memory does not grow with it.

    Args:
        portion: a portion, after `settle_quotes`.
        schema: the table's schema. Ignored columns are not looked at.
        wrong: "raise": a wrong row ends with an error that names its file and line. "count": it is
            left out and counted. A row is wrong if it has another number of fields than the table
            has columns, or a value that its column's kind does not allow. Quotes that do not end,
            or stand where RFC 4180 has none, are an error in any case if `quoted_newlines`, as
            nobody knows where the next record begins.
        texts: columns that are read a second time, as texts with all digits; see `as_text`.

    Yields:
        Batches of at most `BATCH_ROWS` rows. All categorical columns are `Categories`.

    Raises:
        DataError: the file cannot be read, has changed, is damaged or has other columns than the
            schema; or a row is wrong.
        SetupError: a library is missing.
        UserError: the file is HDF5, MPI runs, and `start_workers` was not called before.
    """
    if portion.file.format == "csv":
        return read_csv_rows(portion, schema, wrong, texts)
    if portion.file.format == "parquet":
        return read_parquet_rows(portion, schema, wrong, texts)
    return read_array_rows(portion, schema, wrong, texts)
