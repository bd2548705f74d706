"""Files of tables, the portions that they are cut into, and the rows that are read from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt

from hpc_train.data.prepare.inputs import COMPRESSED, reading_from
from hpc_train.data.tables.features import RawColumns
from hpc_train.data.tables.schema import ColumnKind, TableSchema, columns_beside, repeated
from hpc_train.errors import DataError

TableFormat = Literal["csv", "parquet", "npz", "hdf5"]
WrongPolicy = Literal["raise", "count"]
BATCH_ROWS = 1 << 16  # the most rows of a batch
SAMPLED_ROWS = 4096  # of a row group, or of arrays
CSV_NAMES = "the first line of a csv file has the names of its columns"
PORTION_BYTES = 8 << 20  # of a file; a portion is read by one rank


@dataclass(frozen=True)
class TableFile:
    """A file of a table as it was when it was listed.

    Args:
        path: as the user has given it, or below a folder that the user has given.
        nbytes: the size of the file in bytes.
        mtime_ns: the time of its last change in nanoseconds.
        format: csv, parquet, npz or hdf5. A file of tab-separated values is a csv file, too.
    """

    path: str
    nbytes: int
    mtime_ns: int
    format: TableFormat

    @property
    def compressed(self) -> bool:
        """Whether it has to be read from its beginning."""
        return self.format == "csv" and Path(self.path).suffix.lower() in COMPRESSED

    @property
    def delimiter(self) -> str:
        """What stands between two fields of a csv file."""
        return "\t" if ".tsv" in [suffix.lower() for suffix in Path(self.path).suffixes] else ","

    def check(self, about: os.stat_result) -> None:
        """Make sure that nobody has written to the file.

        Raises:
            DataError: the size or the time of the last change is another one.
        """
        if (about.st_size, about.st_mtime_ns) != (self.nbytes, self.mtime_ns):
            raise DataError(
                f"{self.path} has changed since it was listed",
                "prepare files that nobody writes to; the same command then starts afresh",
            )


@dataclass(frozen=True)
class TablePortion:
    """A part of a file that is read at once: `begin` up to, but not including, `end`.

    Args:
        file: the file.
        begin: where the portion begins: a byte of a csv file, a row group of a Parquet file, or a
            row of the other formats. A compressed csv file is one portion.
        end: where it ends, likewise. A record of a csv file belongs to the portion in which it
            begins.
        quoted_newlines: whether a quoted field of a csv file may have line ends in it.
        inside: whether the first byte of the portion is inside quotes; `settle_quotes` sets it.
    """

    file: TableFile
    begin: int
    end: int
    quoted_newlines: bool = True
    inside: bool = False


@dataclass(frozen=True, eq=False)
class RawRows:
    """A batch of rows.

    Args:
        columns: the values of all columns that are not ignored, of N rows.
        numbers: number of each row in its portion, int64 (N,). Wrong rows have numbers, too; blank
            lines have none.
        where: says where the row of a number is, such as "a.csv, line 3".
        causes: how many wrong rows were left out for each cause.
    """

    columns: RawColumns
    numbers: npt.NDArray[np.int64]
    where: Callable[[int], str]
    causes: Mapping[str, int] = field(default_factory=dict)

    @property
    def wrong(self) -> int:
        """How many wrong rows were left out."""
        return sum(self.causes.values())


@contextmanager
def opened_table(file: TableFile) -> Iterator[BinaryIO]:
    """Open a file of a table, whose bytes may be read in any order.

    Raises:
        DataError: it cannot be read, or it has changed since it was listed, or changes while it is
            open.
    """
    with reading_from(file.path), Path(file.path).open("rb") as opened:
        file.check(os.fstat(opened.fileno()))
        yield cast("BinaryIO", opened)
        file.check(os.fstat(opened.fileno()))


def as_text(name: str) -> str:
    """The key in a batch's columns of a column that is read a second time, as texts."""
    return f"{name}\0as text"


def kinds_read(schema: TableSchema, texts: Collection[str]) -> dict[str, tuple[str, ColumnKind]]:
    """What is read of a table: for each key in a batch's columns the column, and its kind there.

    Args:
        schema: the table's schema.
        texts: columns that are read a second time, as texts; see `as_text`.
    """
    once: dict[str, tuple[str, ColumnKind]]
    once = {one.name: (one.name, one.kind) for one in schema.columns if one.kind != "ignored"}
    return once | {as_text(name): (name, "categorical") for name in texts}


def told_names(file: TableFile, missing: str, names: list[str]) -> str:
    """A remedy for a missing column: the names of those that a file has."""
    told = columns_beside(missing, names)
    if len(names) == 1 and file.format == "csv":
        told += "; commas separate them, or tabs in a .tsv file"
    return told


def check_names(file: TableFile, found: list[str], expected: list[str]) -> None:
    """Make sure that a file has the columns that the table has, in any order.

    Raises:
        DataError: it has others, or one of them twice, or one without a name.
    """
    if "" in found:
        raise DataError(
            f"{file.path}: column {found.index('') + 1} has no name",
            "add it" if file.format != "csv" else f"{CSV_NAMES}; add it, or the name",
        )
    if twice := repeated(found):
        raise DataError(
            f"{file.path} has two columns named {twice[0]!r}",
            "rename one of them" + f"; {CSV_NAMES}" * (file.format == "csv"),
        )
    here, wanted = set(found), set(expected)
    fewer = [name for name in expected if name not in here]
    more = [name for name in found if name not in wanted]
    if fewer or more:
        what = f"no column {fewer[0]!r}" if fewer else f"the column {more[0]!r}, which others lack"
        raise DataError(
            f"{file.path} has {what}",
            "give files with the columns of one table, and a schema that has all of these",
        )
