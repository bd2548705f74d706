"""Rows of .npz archives and of HDF5 files whose columns are arrays of equal length.

HDF5 is never opened here: a helper process tells where the arrays lie (`arrays/indexing.py`).
"""

from __future__ import annotations

import logging
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.data.arrays.indexing import FileIndex, look_up_all
from hpc_train.data.arrays.regions import BoxReader
from hpc_train.data.arrays.stored import Stored
from hpc_train.data.tables.conversion import from_array
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

logger = logging.getLogger(__name__)

LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a member of an archive: signature, two lengths
SKIPPED_BYTES = 1 << 20
TOLD_OTHERS = 5  # datasets that are no columns
TO_COLUMNS = "write each column as one dataset of numbers or of texts of fixed length"
DAMAGES = (
    ValueError, SyntaxError, TypeError, KeyError, zipfile.BadZipFile, zlib.error, EOFError,
    NotImplementedError, RuntimeError, IndexError, tokenize.TokenError, OverflowError, MemoryError,
    struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class _Member:
    """An array of an archive.

    Args:
        member: its name in the archive.
        columns: the names of its columns in the table.
        dtype: the type of its values.
        rows: the number of its rows.
        header: bytes before its values.
        offset: position of its first value in the archive; None if it is compressed.
    """

    member: str
    columns: tuple[str, ...]
    dtype: np.dtype[Any]
    rows: int
    header: int
    offset: int | None

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * len(self.columns)


@contextmanager
def _archive(file: TableFile) -> Iterator[tuple[Any, zipfile.ZipFile]]:
    with opened_table(file) as raw:
        try:
            with zipfile.ZipFile(raw) as archive:
                yield raw, archive
        except DAMAGES as error:
            raise DataError(
                f"{file.path} cannot be read as .npz ({' '.join(str(error).split())[:200]})",
                "write its arrays by numpy.savez, as numbers or fixed-length texts",
            ) from None


def _members(file: TableFile, raw: Any, archive: zipfile.ZipFile) -> list[_Member]:
    found = []
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        with archive.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            read = {(1, 0): np.lib.format.read_array_header_1_0}
            read[(2, 0)] = np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read[version](stream)
            header = stream.tell()
        if dtype.hasobject:
            raise ValueError(f"array {name} has Python objects, which are not read")
        if dtype.fields is not None or not 1 <= len(shape) <= 2:
            raise ValueError(f"array {name} has the shape {shape} and the type {dtype}")
        if len(shape) == 2 and fortran and min(shape) > 1:
            raise ValueError(f"array {name} is in Fortran's order; save numpy.ascontiguousarray")
        columns = (name,) if len(shape) == 1 else tuple(f"{name}_{n}" for n in range(shape[1]))
        if info.file_size - header != shape[0] * len(columns) * dtype.itemsize:
            raise ValueError(f"array {name} has another number of bytes than of values")
        stored = info.compress_type == zipfile.ZIP_STORED
        offset = _offset(raw, info) + header if stored else None
        found.append(_Member(info.filename, columns, dtype, shape[0], header, offset))
    if len({one.rows for one in found}) != 1:
        raise ValueError("its arrays have different lengths" if found else "it has no arrays")
    names = [name for one in found for name in one.columns]
    check_names(file, names, names)
    return found


def _offset(raw: Any, info: zipfile.ZipInfo) -> int:
    raw.seek(info.header_offset)
    signature, name, extra = LOCAL_HEADER.unpack(raw.read(LOCAL_HEADER.size))
    if signature != b"PK\3\4":
        raise zipfile.BadZipFile("a member's header is damaged")
    return int(info.header_offset + LOCAL_HEADER.size + name + extra)


@dataclass(frozen=True, eq=False)
class _Hdf5Table:
    """The columns of an HDF5 file.

    Args:
        index: where its datasets lie.
        columns: for each column its dataset, the field of a row in it, and the number of the value
            in the field; None where there is none.
        rows: the number of rows.
    """

    index: FileIndex
    columns: dict[str, tuple[str, str | None, int | None]]
    rows: int


@lru_cache(maxsize=8)
def _hdf5(file: TableFile) -> _Hdf5Table:
    """Find the columns of an HDF5 file: the fields of its table, or its datasets of one axis.

    Raises:
        DataError: it has none, or they have different lengths.
        UserError: MPI runs, and no helper can be started.
    """
    index, refused = look_up_all(Path(file.path))
    flat = {name: one for name, one in index.variables.items() if len(one.shape) == 1}
    tables = {name: one for name, one in flat.items() if one.dtype.kind == "V"}
    used = tables or flat
    others = refused | {
        name: f"it has {len(one.shape)} axes" if name not in flat else "it is no field of the table"
        for name, one in index.variables.items()
        if name not in used
    }
    told = [f"{name}: {reason[:300]}" for name, reason in [*others.items()][:TOLD_OTHERS]]
    told += [f"and {len(others) - TOLD_OTHERS} more"] * (len(others) > TOLD_OTHERS)
    why = "; ".join(told) or "none"
    if not used:
        raise DataError(
            f"{file.path} has no dataset of one axis that can be read ({why})", TO_COLUMNS
        )
    if len(tables) > 1 or len({one.shape for one in used.values()}) != 1:
        what = "several tables" if tables else "datasets of one axis and different lengths"
        raise DataError(f"{file.path} has {what}: {', '.join(used)}", "give files of one table")
    if others:
        logger.info("%s: these datasets are no columns (%s); %s", file.path, why, TO_COLUMNS)
    named: list[tuple[str, tuple[str, str | None, int | None]]] = []
    folders = {name.rpartition("/")[0] for name in used}
    for name, one in used.items():
        if one.dtype.names is None:
            named.append(
                (name.rpartition("/")[2] if len(folders) == 1 else name, (name, None, None))
            )
            continue
        for field in one.dtype.names:
            if not one.dtype[field].shape:
                named.append((field, (name, field, None)))
            else:
                count = one.dtype[field].shape[0]
                named += [(f"{field}_{n}", (name, field, n)) for n in range(count)]
    names = [name for name, _ in named]
    check_names(file, names, names)
    [(rows,)] = {one.shape for one in used.values()}
    return _Hdf5Table(index, dict(named), rows)


def array_columns(file: TableFile) -> list[str]:
    """The names of the columns of a .npz or HDF5 file.

    Raises:
        DataError: it cannot be read.
    """
    if file.format == "hdf5":
        return list(_hdf5(file).columns)
    with _archive(file) as (raw, archive):
        return [name for one in _members(file, raw, archive) for name in one.columns]


def cut_arrays(file: TableFile, nbytes: int) -> list[TablePortion]:
    """The portions of a .npz or HDF5 file: rows of about as many bytes; all of a compressed .npz.

    Raises:
        DataError: the file cannot be read.
    """
    if file.format == "hdf5":
        table = _hdf5(file)
        rows = table.rows
        used = {name for name, _, _ in table.columns.values()}
        width = sum(table.index.variables[name].dtype.itemsize for name in used)
    else:
        with _archive(file) as (raw, archive):
            members = _members(file, raw, archive)
        rows = members[0].rows
        width = sum(one.row_bytes for one in members)
        if any(one.offset is None for one in members):
            width = 0
    step = max(1, nbytes // width) if width else max(rows, 1)
    return [TablePortion(file, at, min(at + step, rows)) for at in range(0, rows, step)]


def read_array_rows(
    portion: TablePortion, schema: TableSchema, wrong: WrongPolicy, texts: Collection[str]
) -> Iterator[RawRows]:
    """The rows of a portion of a .npz or HDF5 file. `sources.read_rows` describes it."""
    file = portion.file
    check_names(file, array_columns(file), [column.name for column in schema.columns])
    wanted = kinds_read(schema, texts)
    for begin, arrays in _batches(file, portion.begin, portion.end):
        columns = {}
        for key, (name, kind) in wanted.items():
            try:
                columns[key] = from_array(arrays[name], kind, schema.missing)
            except DataError as error:
                cause = f"{file.path}: column {name!r} {error.cause}"
                raise DataError(cause, error.remedy) from None
        count = len(next(iter(arrays.values())))
        numbers = np.arange(begin, begin + count) - portion.begin
        yield from judged_batches(
            columns, numbers, wrong, lambda row: f"{file.path}, row {portion.begin + row + 1}"
        )


def sample_arrays(file: TableFile) -> dict[str, np.ndarray]:
    """The first rows of a .npz or HDF5 file, by column.

    Raises:
        DataError: the file cannot be read.
    """
    found = next(_batches(file, 0, SAMPLED_ROWS), None)
    return found[1] if found else dict.fromkeys(array_columns(file), np.empty(0))


def _batches(file: TableFile, begin: int, end: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Batches of the rows from `begin` to `end`: the number of the first row, and the columns."""
    if file.format == "hdf5":
        yield from _hdf5_batches(file, begin, end)
        return
    with _archive(file) as (raw, archive), ExitStack() as stack:
        members = _members(file, raw, archive)
        end = min(end, members[0].rows)
        streams: list[Any] = []
        for one in members:
            stream = stack.enter_context(archive.open(one.member)) if one.offset is None else raw
            streams.append(stream)
            left = one.header + begin * one.row_bytes if one.offset is None else 0
            while left > 0 and (skipped := stream.read(min(left, SKIPPED_BYTES))):
                left -= len(skipped)
        for at in range(begin, end, BATCH_ROWS):
            count = min(BATCH_ROWS, end - at)
            arrays: dict[str, np.ndarray] = {}
            for one, stream in zip(members, streams, strict=True):
                if one.offset is not None:
                    stream.seek(one.offset + at * one.row_bytes)
                data = stream.read(count * one.row_bytes)
                values = np.frombuffer(data, one.dtype).reshape(count, len(one.columns))
                arrays.update(zip(one.columns, values.T, strict=True))
            yield at, arrays


def _hdf5_batches(
    file: TableFile, begin: int, end: int
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    table = _hdf5(file)
    with closing(BoxReader([table.index])) as reader:
        end = min(end, table.rows)
        for at in range(begin, end, BATCH_ROWS):
            read: dict[str, np.ndarray] = {}
            arrays = {}
            for column, (name, field, number) in table.columns.items():
                stored = table.index.variables[name]
                if name not in read:
                    read[name] = np.empty(min(BATCH_ROWS, end - at), stored.dtype)
                    reader.read(0, name, (at,), read[name])
                values = read[name] if field is None else read[name][field]
                values = values if number is None else values[:, number]
                arrays[column] = _meant(values, stored, truth=field in stored.truth)
            if at + BATCH_ROWS >= end:
                reader.check()
            yield at, arrays


def _meant(values: np.ndarray, stored: Stored, *, truth: bool) -> np.ndarray:
    """The values that the file's type and the CF conventions' attributes make of stored ones.

    In whole numbers the missing ones are masked, because floats would not hold all digits.
    """
    if (stored.scale, stored.add) == (1.0, 0.0) and (truth or values.dtype.kind != "f"):
        # Their texts are those of truth values in other formats.
        meant = values != 0 if truth else values
        if not stored.missing:
            return meant
        return np.ma.masked_array(meant, np.isin(values, stored.missing))
    meant = values * stored.scale + stored.add
    meant[np.isin(values, stored.missing)] = np.nan
    return meant
