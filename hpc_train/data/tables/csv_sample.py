"""Samples of csv files, by which the kinds of their columns are inferred."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from hpc_train.data.prepare.inputs import reading_from
from hpc_train.data.tables.csv_lines import (
    FEED,
    PARSED_BYTES,
    first_end,
    plain_stream,
    skip_to,
    stray_quotes,
)
from hpc_train.data.tables.csv_source import csv_columns
from hpc_train.data.tables.table_files import TableFile, opened_table
from hpc_train.errors import DataError

SAMPLE_BYTES = 1 << 18
MIDDLE_SAMPLES = 4  # blocks in the middle of a large file that are sampled


def sample_csv(file: TableFile) -> tuple[list[str], list[list[list[str]]]]:
    """Some records of a csv file: its first ones and, if it is large, some in its middle.

    Returns:
        The names of its columns, and blocks of records as texts. Records with another number of
        fields, and bytes that are not UTF-8, are left out.

    Raises:
        DataError: the file cannot be read, has no header, or no record with its number of fields.
    """
    names, header = csv_columns(file)
    places = [header]
    if not file.compressed and file.nbytes > 4 * MIDDLE_SAMPLES * SAMPLE_BYTES:
        step = (file.nbytes - header) // (MIDDLE_SAMPLES + 1)
        places += [header + step * number for number in range(1, MIDDLE_SAMPLES + 1)]
    blocks: list[list[list[str]]] = []
    lengths: set[int] = set()
    with reading_from(file.path), opened_table(file) as raw:
        stream = plain_stream(raw, file)
        for place in places:
            skip_to(stream, place, file)
            data = stream.read(SAMPLE_BYTES)
            whole = len(data) < SAMPLE_BYTES
            block = _sampled(data, file.delimiter, first=place == header, whole=whole)
            text = io.StringIO(block.decode("utf-8", "ignore").replace("\0", ""), newline="")
            rows = csv.reader(text, delimiter=file.delimiter)
            found = [row for row in _lenient(rows) if row]
            lengths.update(map(len, found))
            blocks.append([row for row in found if len(row) == len(names)])
    if lengths and len(names) not in lengths:
        raise DataError(
            f"{file.path}: its rows have {min(lengths)} fields, but its first line names "
            f"{len(names)} columns",
            "mend the first line, or the rows",
        )
    return names, blocks


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
