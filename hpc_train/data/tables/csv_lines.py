"""Where the records of csv files begin: line ends, quotes, and blocks of whole records.

Quotes are those of RFC 4180: a field is quoted as a whole, and a quote in it is written twice. So a
line end is inside a field if the number of quotes before it is odd, and ranks find all borders of
records from the numbers of quotes in parts of a file. Only line feeds are borders. A carriage
return alone ends a record, too, but a file is not cut there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hpc_train.data.prepare.inputs import decompressed
from hpc_train.data.tables.table_files import TableFile, opened_table
from hpc_train.errors import DataError

PARSED_BYTES = 4 << 20  # of records that are parsed at once
RECORD_BYTES = 16 << 20  # a longer record is refused, so that memory is bounded
CSV_PIECE_BYTES = 1 << 20
QUOTE, FEED, RETURN = b'"', b"\n", b"\r"


class LongRecord(Exception):
    """A record has more than RECORD_BYTES, or its quotes do not end. The argument is its offset."""


def first_end(data: bytes, begin: int, *, inside: bool) -> tuple[int, bool]:
    """Find the first end of a record.

    Args:
        data: part of a file.
        begin: the place in it at which the search begins.
        inside: whether that place is inside quotes.

    Returns:
        The place behind the record's end, or -1 if there is none, and whether the end of the data
        is inside quotes (only if there is none).
    """
    place = begin
    while True:
        quote = data.find(QUOTE, place)
        if not inside:
            feed = data.find(FEED, place, quote if quote >= 0 else len(data))
            if feed >= 0:
                return feed + 1, False
        if quote < 0:
            return -1, inside
        inside, place = not inside, quote + 1


def last_end(data: bytes, *, inside: bool) -> int:
    """The place behind the last end of a record, 0 if there is none.

    Args:
        data: part of a file.
        inside: whether its end is inside quotes.
    """
    end = len(data)
    while True:
        quote = data.rfind(QUOTE, 0, end)
        if not inside:
            feed = data.rfind(FEED, quote + 1, end)
            if feed >= 0:
                return feed + 1
        if quote < 0:
            return 0
        inside, end = not inside, quote


def plain_stream(raw: Any, file: TableFile) -> Any:
    """The text of an open csv file, compressed or not, as a stream of bytes."""
    return decompressed(raw, file.path) if file.compressed else raw


def find_begin(stream: Any, begin: int, *, quoted_newlines: bool, inside: bool) -> int:
    """The first place at or behind `begin` at which a record begins, or the end of the file.

    Args:
        stream: the file's text, which can be sought in.
        begin: the place, above 0.
        quoted_newlines: whether line ends may be inside quotes.
        inside: whether the place is inside quotes.

    Raises:
        LongRecord: there is none in the next RECORD_BYTES.
    """
    stream.seek(begin - 1)
    if stream.read(1) == FEED and not inside:
        return begin
    place = begin
    while piece := stream.read(CSV_PIECE_BYTES):
        if quoted_newlines:
            found, inside = first_end(piece, 0, inside=inside)
        else:
            found = piece.find(FEED) + 1 or -1
        if found >= 0:
            return place + int(found)
        place += len(piece)
        if place - begin > RECORD_BYTES:
            raise LongRecord(begin)
    return place


def record_blocks(
    stream: Any, begin: int, end: int, *, quoted_newlines: bool
) -> Iterator[tuple[int, bytes]]:
    """Blocks of all records that begin from `begin` up to, but not including, `end`.

    Args:
        stream: the file's text, at `begin`.
        begin: the place of a record's begin.
        end: a place.
        quoted_newlines: whether line ends may be inside quotes.

    Yields:
        The place of a block in the file, and the block: whole records. Only the file's last record
        may lack a line end.

    Raises:
        LongRecord: a record is too long, or the file ends inside quotes.
    """
    offset, data, last = begin, b"", False
    while offset < end and not last:
        more = stream.read(PARSED_BYTES)
        data += more
        if not data:
            return
        if more:
            cut, last = _cut(data, end - 1 - offset, quoted_newlines=quoted_newlines)
        else:
            last = not quoted_newlines or data.count(QUOTE) % 2 == 0
            cut = len(data) if last else last_end(data, inside=True)
        if cut:
            yield offset, data[:cut]
            offset, data = offset + cut, data[cut:]
        if not last and (not more or len(data) > RECORD_BYTES):
            raise LongRecord(offset)


def _cut(data: bytes, place: int, *, quoted_newlines: bool) -> tuple[int, bool]:
    """Where whole records end in data that begin with one.

    The second value says whether the record that has a place is among them, or ends before it.
    """
    if not quoted_newlines:
        cut = data.find(FEED, place) + 1 if place < len(data) else 0
        return (cut, True) if cut else (data.rfind(FEED) + 1, False)
    if place < len(data):
        cut, _ = first_end(data, place, inside=data.count(QUOTE, 0, place) % 2 == 1)
        if cut > 0:
            return cut, True
    return last_end(data, inside=data.count(QUOTE) % 2 == 1), False


def stray_quotes(block: bytes, delimiter: str, *, per_line: bool) -> npt.NDArray[np.int64]:
    """The places of quotes that RFC 4180 does not allow where they stand.

    Args:
        block: whole records.
        delimiter: what stands between two fields.
        per_line: whether no line end is inside quotes.

    Returns:
        The places. One behind another may be there only because of the other.
    """
    if QUOTE not in block:
        return np.empty(0, np.int64)
    data = np.frombuffer(block, np.uint8)
    places = np.flatnonzero(data == ord(QUOTE))
    number = np.arange(len(places))
    unclosed = np.zeros(len(places), bool)
    if per_line:
        lines = np.searchsorted(np.flatnonzero(data == ord(FEED)), places)
        first = np.searchsorted(lines, lines)  # number of the first quote of the same line
        number -= first
        last = np.append(lines[1:] != lines[:-1], True)
        unclosed = last & (number % 2 == 0)
    around = np.zeros(256, bool)
    around[[ord(delimiter), *QUOTE, *FEED, *RETURN]] = True
    before, behind = around[data[places - 1]], around[data[(places + 1) % len(data)]]
    before |= places == 0
    behind |= places == len(data) - 1
    opens = number % 2 == 0
    wrong = np.where(opens, ~before, ~behind) | unclosed
    return places[wrong]


def record_begin(block: bytes, number: int, *, quoted_newlines: bool) -> int:
    """The place in a block at which its record of a number from 0 begins. Blank lines are none."""
    data = np.frombuffer(block, np.uint8)
    ends = (data == ord(FEED)) | (data == ord(RETURN))
    if quoted_newlines and QUOTE in block:
        ends &= np.cumsum(data == ord(QUOTE)) % 2 == 0
    places = np.flatnonzero(ends)
    begins = np.append(0, places + 1)
    lengths = np.append(places, len(block)) - begins
    found = begins[lengths > 0]
    return int(found[number]) if number < len(found) else len(block)


def count_lines(data: bytes) -> int:
    """The number of line ends: line feeds, and carriage returns that none follows."""
    return data.count(FEED) + data.count(RETURN) - data.count(RETURN + FEED)


def line_at(file: TableFile, place: int) -> int:
    """The number of the line at a place of a file's text. It reads the file up to there.

    Raises:
        DataError: the file cannot be read.
    """
    lines, before = 1, b""
    with opened_table(file) as raw:
        stream = plain_stream(raw, file)
        while place > 0 and (piece := stream.read(min(place, CSV_PIECE_BYTES))):
            place -= len(piece)
            lines += count_lines(before + piece) - count_lines(before)
            before = piece[-1:]
    return lines


def damaged_line(file: TableFile, place: int, what: str, remedy: str) -> DataError:
    """An error that names the line at a place of a file's text."""
    return DataError(f"{file.path}, line {line_at(file, place)}: {what}", remedy)


def skip_to(stream: Any, place: int, file: TableFile) -> None:
    """Go to a place of a file's text; in a compressed file only once."""
    if not file.compressed:
        stream.seek(place)
    while file.compressed and place > 0 and (piece := stream.read(min(place, CSV_PIECE_BYTES))):
        place -= len(piece)
