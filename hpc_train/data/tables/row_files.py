"""Files of typed rows between the reading of a table and its shards, and files of arrays.

A file has arrays one behind the other, each as NumPy's .npy format has it. Rows are in batches. A
batch has the rows' numbers, and then the columns in the schema's order.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hpc_train.data.tables.features import Categories, RawColumns
from hpc_train.data.tables.schema import TableSchema
from hpc_train.errors import DataError

TEXT_ERRORS = "surrogatepass"  # texts of other encodings may have lone surrogates


def write_array(file: BinaryIO, array: np.ndarray) -> int:
    """Append an array without Python objects. Returns the place where it begins."""
    place = file.tell()
    np.save(file, array, allow_pickle=False)
    return place


def read_array(file: BinaryIO, place: int | None = None, *, skip: bool = False) -> np.ndarray:
    """Read an array.

    Args:
        file: the file.
        place: where the array begins; None: here.
        skip: go behind it only, and return an empty array.
    """
    if place is not None:
        file.seek(place)
    if not skip:
        found: np.ndarray = np.load(file, allow_pickle=False)
        return found
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    file.seek(int(np.prod(shape)) * dtype.itemsize, os.SEEK_CUR)
    return np.empty(0)


def write_texts(file: BinaryIO, texts: Sequence[str]) -> int:
    """Append texts. Returns the place where they begin."""
    stored = [text.encode("utf-8", TEXT_ERRORS) for text in texts]
    place = write_array(file, np.fromiter(map(len, stored), np.int32, len(stored)))
    write_array(file, np.frombuffer(b"".join(stored), np.uint8))
    return place


def read_texts(file: BinaryIO, place: int | None = None, *, skip: bool = False) -> list[str]:
    """Read texts. `read_array` describes the arguments."""
    ends = read_array(file, place, skip=skip).cumsum().tolist()
    content = read_array(file, skip=skip).tobytes()
    begins = [0, *ends]
    return [
        content[begin:end].decode("utf-8", TEXT_ERRORS)
        for begin, end in zip(begins, ends, strict=False)
    ]


def columns_read(schema: TableSchema) -> list[str]:
    """The names of the columns that are read from a table's files."""
    return [column.name for column in schema.columns if column.kind != "ignored"]


def write_batch(
    file: BinaryIO, schema: TableSchema, numbers: np.ndarray, columns: RawColumns
) -> None:
    """Append a batch of rows.

    Args:
        file: the file.
        schema: the table's schema.
        numbers: number of each row in its portion, int64 (N,).
        columns: the values of all columns that are read.
    """
    write_array(file, numbers)
    for name in columns_read(schema):
        values = columns[name]
        if isinstance(values, Categories):
            write_array(file, values.codes)
            write_texts(file, values.values)
        else:
            write_array(file, np.asarray(values, np.float64))


def read_batches(
    path: Path, schema: TableSchema, only: Collection[str] | None = None
) -> Iterator[tuple[np.ndarray, RawColumns]]:
    """The batches of rows in a file: the numbers of the rows, and their columns.

    Args:
        path: the file.
        schema: the table's schema.
        only: the columns to read; None: all.
    """
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        while file.tell() < nbytes:
            numbers = read_array(file)
            columns: dict[str, np.ndarray | Categories] = {}
            for name in columns_read(schema):
                skip = only is not None and name not in only
                values = read_array(file, skip=skip)
                if schema.kind(name) == "categorical":
                    texts = tuple(read_texts(file, skip=skip))
                    columns[name] = Categories(values, texts)
                elif not skip:
                    columns[name] = values
            if len(numbers):
                yield numbers, columns


def lost_rows(path: Path, error: Exception) -> DataError:
    """The error for a file of rows that cannot be read back."""
    return DataError(
        f"{path} cannot be read back ({error})", "check the disk, and run the same command again"
    )
