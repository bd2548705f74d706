"""Samples of csv files, by which the kinds of their columns are inferred."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpc_train.data.prepare.inputs import reading_from
from hpc_train.data.tables.csv_lines import (
    FEED,
    PARSED_BYTES,
    RECORD_BYTES,
    first_end,
    plain_stream,
    skip_to,
    stray_quotes,
)
from hpc_train.data.tables.csv_source import csv_columns
from hpc_train.data.tables.table_files import TableFile, opened_table
from hpc_train.errors import DataError

SAMPLE_BYTES = 1 << 18  # size of a sample that has enough records
SAMPLED_RECORDS = 64  # number of records that are enough, from the beginnings of all files together
MOST_BYTES = 4 * RECORD_BYTES  # largest size of a sample
MIDDLE_SAMPLES = 4  # blocks in the middle of a large file that are sampled


def sample_csv(file: TableFile, files: int = 1) -> tuple[list[str], list[list[list[str]]]]:
    """Some records of a csv file: its first ones and, if it is large, some in its middle.

    Args:
        file: the file.
        files: how many files of the table are sampled, so that all samples fit into memory.

    Returns:
        The names of its columns, and blocks of records as texts. Records with another number of
        fields, and bytes that are not UTF-8, are left out.

    Raises:
        DataError: the file cannot be read, has no header, or no record with its number of fields.
    """
    names, header = csv_columns(file)
    first = max(1, SAMPLED_RECORDS // files)
    with reading_from(file.path), opened_table(file) as raw, _long_fields():
        stream = plain_stream(raw, file)
        skip_to(stream, header, file)
        found, nbytes = _records(stream, file.delimiter, first, MOST_BYTES, first=True)
        samples = [found]
        if not file.compressed and file.nbytes > 4 * MIDDLE_SAMPLES * nbytes:
            step = (file.nbytes - header) // (MIDDLE_SAMPLES + 1)
            for number in range(1, MIDDLE_SAMPLES + 1):
                skip_to(stream, header + step * number, file)
                samples.append(_records(stream, file.delimiter, 1, nbytes, first=False)[0])
    lengths = {len(row) for rows in samples for row in rows}
    if lengths and len(names) not in lengths:
        raise DataError(
            f"{file.path}: its rows have {min(lengths)} fields, but its first line names "
            f"{len(names)} columns",
            "mend the first line, or the rows",
        )
    return names, [[row for row in rows if len(row) == len(names)] for rows in samples]


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let a field be as long as a record. The limit is one of the whole process."""
    before = csv.field_size_limit(RECORD_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _records(
    stream: Any, delimiter: str, least: int, most: int, *, first: bool
) -> tuple[list[list[str]], int]:
    """The records of a sample that begins at the place of a stream, and its size in bytes.

    Args:
        stream: the file's text.
        delimiter: what stands between two fields.
        least: number of records at which the sample stops growing.
        most: number of bytes at which it stops in any case.
        first: whether a record begins at the place.
    """
    data = b""
    while True:
        wanted = max(SAMPLE_BYTES, len(data))
        more = stream.read(wanted)
        whole, data = len(more) < wanted, data + more
        block = _sampled(data, delimiter, first=first, whole=whole)
        text = io.StringIO(block.decode("utf-8", "ignore").replace("\0", ""), newline="")
        found = [row for row in _lenient(csv.reader(text, delimiter=delimiter)) if row]
        if whole or len(found) >= least or len(data) >= most:
            return found, len(data)


def _sampled(data: bytes, delimiter: str, *, first: bool, whole: bool) -> bytes:
    """The whole records of a sample, whose begin may be inside quotes if it is not the first."""
    for inside in (False,) if first else (False, True):
        begin = 0 if first else first_end(data, 0, inside=inside)[0]
        block = data[max(begin, 0) :]
        block = block if whole else block[: block.rfind(FEED) + 1]
        if begin >= 0 and not len(stray_quotes(block[:PARSED_BYTES], delimiter, per_line=False)):
            return block
    return data[: data.rfind(FEED) + 1] if first else b""


def _lenient(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error:
            continue
