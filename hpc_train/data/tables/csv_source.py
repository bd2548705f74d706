"""Rows of csv files, read in portions and parsed by pyarrow.

Blocks of whole records are parsed at once. Each column is read as the Arrow type that suits its
kind. A block with a value that does not is read again as texts, so that each wrong value is found.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hpc_train.data.prepare.foreign import import_pyarrow
from hpc_train.data.prepare.inputs import reading_from
from hpc_train.data.tables.conversion import (
    CAUSES,
    EPOCH,
    FIELDS,
    QUOTES,
    ColumnValues,
    from_arrow,
    without_missing,
)
from hpc_train.data.tables.csv_lines import (
    CSV_PIECE_BYTES,
    FEED,
    QUOTE,
    RECORD_BYTES,
    LongRecord,
    count_lines,
    damaged_line,
    find_begin,
    first_end,
    line_at,
    plain_stream,
    record_begin,
    record_blocks,
    skip_to,
    stray_quotes,
)
from hpc_train.data.tables.features import Categories
from hpc_train.data.tables.schema import ColumnKind, TableSchema
from hpc_train.data.tables.table_files import (
    RawRows,
    TableFile,
    TablePortion,
    WrongPolicy,
    as_text,
    check_names,
    opened_table,
)
from hpc_train.data.tables.wrong_rows import MEND_VALUE, first_wrong, right_batches
from hpc_train.errors import DataError

CSV_INDEX = "__index_level_0__"  # as in Parquet: the index that pandas writes without a name
BOM = b"\xef\xbb\xbf"
FIRST_DATE = (datetime.min.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
ENDLESS = 1 << 62  # an end behind that of any file
MEND = "mend the file, or leave such rows out by --wrong_rows count"
MEND_QUOTES = (
    "write a quote inside a quoted field twice, and quote only whole fields; or give "
    "--no_quoted_newlines if no field has line ends"
)
_STRAY = b"\x01stray quote"  # stands for a line with one: it has another number of fields


def cut_csv(file: TableFile, nbytes: int, *, quoted_newlines: bool) -> list[TablePortion]:
    """The portions of a csv file, before `settle_quotes`. It is not opened."""
    if file.compressed:
        return [TablePortion(file, 0, ENDLESS, quoted_newlines)]
    return [
        TablePortion(file, begin, min(begin + nbytes, file.nbytes), quoted_newlines)
        for begin in range(0, max(file.nbytes, 1), nbytes)  # an empty file is told when it is read
    ]


def count_quotes(portion: TablePortion) -> int:
    """The number of quotes in a portion of a csv file, for `settle_quotes`. Any rank may call it.

    It is 0 without reading where nobody needs it: in a compressed file, which is one portion, and
    where no quoted field has line ends.

    Raises:
        DataError: the file cannot be read.
    """
    if portion.file.compressed or not portion.quoted_newlines:
        return 0
    count, left = 0, portion.end - portion.begin
    with opened_table(portion.file) as stream:
        stream.seek(portion.begin)
        while left > 0 and (piece := stream.read(min(left, CSV_PIECE_BYTES))):
            count += piece.count(QUOTE)
            left -= len(piece)
    return count


@lru_cache(maxsize=16)  # a rank reads many portions of a file
def csv_columns(file: TableFile) -> tuple[list[str], int]:
    """The names of a csv file's columns, and the place of its first record.

    A first column without a name is called CSV_INDEX.

    Raises:
        DataError: the file cannot be read, is empty, or has no header.
    """
    with opened_table(file) as raw:
        stream = plain_stream(raw, file)
        begin = stream.read(CSV_PIECE_BYTES)
        while (end := first_end(begin, _blank(begin), inside=False)[0]) < 0:
            more = stream.read(CSV_PIECE_BYTES)
            if not more or len(begin) > RECORD_BYTES:
                break
            begin += more
    header = begin[_blank(begin) : end if end >= 0 else len(begin)]
    if not header:
        raise DataError(f"{file.path} is empty", "leave it out")
    if header.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{file.path} is in UTF-16", "convert it to UTF-8, as by `iconv -f UTF-16`")
    if b"\0" in header or (end < 0 and len(header) > RECORD_BYTES):
        raise DataError(f"{file.path} does not begin like a csv file", "leave it out")
    try:
        text = io.StringIO(header.decode("utf-8"), newline="")
        names = next(csv.reader(text, delimiter=file.delimiter, strict=True))
    except UnicodeDecodeError:
        raise DataError(f"{file.path}, line 1: it is not UTF-8", "convert the file") from None
    except (csv.Error, StopIteration) as error:
        raise DataError(
            f"{file.path}: its first line does not name its columns ({error})", "mend the line"
        ) from None
    if len(names) > 1 and not names[0]:
        names[0] = CSV_INDEX
    check_names(file, names, names)
    # The reader has taken the header alone, also where a carriage return ends it.
    used = text.getvalue()[: text.tell()].encode("utf-8")
    return names, _blank(begin) + len(used)


def _blank(begin: bytes) -> int:
    """The number of bytes before the header: a byte order mark and blank lines."""
    place = len(BOM) if begin.startswith(BOM) else 0
    return len(begin) - len(begin[place:].lstrip(b"\r\n"))


def read_csv_rows(
    portion: TablePortion, schema: TableSchema, wrong: WrongPolicy, texts: Collection[str]
) -> Iterator[RawRows]:
    """The rows of a portion of a csv file. `sources.read_rows` describes it."""
    file = portion.file
    names, header = csv_columns(file)
    check_names(file, names, [column.name for column in schema.columns])
    parse = _Parser(names, schema, file.delimiter, texts)
    number = 0
    with reading_from(file.path), opened_table(file) as raw:
        stream = plain_stream(raw, file)
        how = {"quoted_newlines": portion.quoted_newlines}
        try:
            begin = header
            if portion.begin > header:
                begin = find_begin(stream, portion.begin, inside=portion.inside, **how)
            if begin >= portion.end:
                return
            skip_to(stream, begin, file)
            for place, block in record_blocks(stream, begin, portion.end, **how):
                judged = _Block(portion, place, block)
                yield from judged.rows(parse, wrong, number)
                number += judged.count
        except LongRecord as error:
            raise damaged_line(
                file,
                error.args[0],
                f"the record that begins there does not end within {RECORD_BYTES} bytes or the "
                "end of the file; a quote may not be closed",
                f"mend the file; {MEND_QUOTES}",
            ) from None


class _Parser:
    """Parses blocks, and remembers which Arrow types have suited the columns so far."""

    def __init__(
        self, names: list[str], schema: TableSchema, delimiter: str, texts: Collection[str]
    ) -> None:
        pa = import_pyarrow()
        import pyarrow.csv

        self.pa, self.csv, self.names, self.delimiter = pa, pyarrow.csv, names, delimiter
        self.text = pa.dictionary(pa.int32(), pa.string())
        self.bytes = pa.dictionary(pa.int32(), pa.binary())
        self.kinds = {c.name: c.kind for c in schema.columns if c.kind != "ignored"}
        self.missing = list(schema.missing)
        self.suiting = {
            "numeric": [pa.float64(), pa.bool_()],
            "date": [pa.timestamp("us"), pa.timestamp("us", "UTC")],
            "categorical": [],
        }
        self.types = {n: (*self.suiting[kind], self.text)[0] for n, kind in self.kinds.items()}
        self.texts = texts  # columns that are read a second time
        self.types |= dict.fromkeys(texts, self.text)

    def parse(self, block: bytes, types: dict[str, Any], skip: Callable[[Any], str]) -> Any:
        """Parse a block to an Arrow table of the columns that have types."""
        csv_options = self.csv
        return csv_options.read_csv(
            self.pa.BufferReader(block),
            csv_options.ReadOptions(
                use_threads=False, column_names=self.names, block_size=len(block) + 1
            ),
            csv_options.ParseOptions(
                delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=skip
            ),
            csv_options.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=self.missing,
                strings_can_be_null=True,
            ),
        ).combine_chunks()

    def converted(self, block: bytes) -> tuple[int, dict[str, ColumnValues], list[Any]]:
        """The number of rows of a block, their values, and the rows with too many or few fields."""
        skipped: list[Any] = []

        def skip(row: Any) -> str:
            skipped.append(row)
            return "skip"

        readable = _is_utf8(block)
        if readable and b"\0" not in block:
            try:
                table = self.parse(block, self.types, skip)
                if not any(map(_is_early, table.itercolumns())):
                    return table.num_rows, self._columns(table) | self._second(table), skipped
            except self.pa.ArrowInvalid:
                pass
            skipped.clear()
        if not readable:  # pyarrow cannot tell of rows that are not UTF-8
            block = block.decode("latin-1").encode("utf-8")
        table = self.parse(block, dict.fromkeys(self.kinds, self.bytes), skip)
        if not readable:
            table = self._as_given(table)
        columns = {}
        for name, kind in self.kinds.items():
            [array] = table.column(name).chunks
            suiting = self._suiting(array, kind)
            columns[name] = self._values(array if suiting is None else suiting, kind)
            if name not in self.texts and (suiting is not None or columns[name].causes is None):
                self.types[name] = self.text if suiting is None else suiting.type
        return table.num_rows, columns | self._second(table), skipped

    def _as_given(self, table: Any) -> Any:
        """The bytes of a table that was parsed as if each byte were a character."""
        pa, found = self.pa, {}
        for name in table.column_names:
            [array] = table.column(name).chunks
            given = [one.decode("utf-8").encode("latin-1") for one in array.dictionary.to_pylist()]
            found[name] = pa.DictionaryArray.from_arrays(
                array.indices, pa.array(given, pa.binary())
            )
        return pa.table(found)

    def _columns(self, table: Any) -> dict[str, ColumnValues]:
        found = {}
        for name, kind in self.kinds.items():
            [array] = table.column(name).chunks
            found[name] = self._values(array, kind)
        return found

    def _second(self, table: Any) -> dict[str, ColumnValues]:
        found = {}
        for name in self.texts:
            [array] = table.column(name).chunks
            found[as_text(name)] = from_arrow(array, "categorical", self.missing)
        return found

    def _values(self, array: Any, kind: ColumnKind) -> ColumnValues:
        found = from_arrow(array, kind, self.missing)
        if isinstance(found.raw, Categories):
            return found
        # pyarrow compares exact texts, but reads a number with blanks around it.
        return replace(found, raw=without_missing(found.raw, kind, self.missing))

    def _suiting(self, array: Any, kind: str) -> Any:
        """An array of texts as the first Arrow type that suits all of them; None: none does."""
        for one in self.suiting[kind]:
            try:
                found = array.dictionary_decode().cast(self.pa.string()).cast(one)
            except self.pa.ArrowInvalid:
                continue
            return None if _is_early(found) else found
        return None


class _Block:
    """A block of a portion. It knows where its records are, for errors."""

    def __init__(self, portion: TablePortion, place: int, block: bytes) -> None:
        self.portion, self.place, self.block = portion, place, block
        self.count = 0  # of records

    def rows(self, parser: _Parser, wrong: WrongPolicy, number: int) -> Iterator[RawRows]:
        """The rows of the block. Its first record has this number."""
        file, per_line = self.portion.file, not self.portion.quoted_newlines
        stray = stray_quotes(self.block, file.delimiter, per_line=per_line)
        if len(stray):
            if wrong == "raise" or not per_line:
                remedy = MEND if per_line else MEND_QUOTES
                raise damaged_line(file, self.place + int(stray[0]), CAUSES[QUOTES], remedy)
            self.block = _without(self.block, stray, len(parser.names))
        if not self.block.strip(b"\r\n"):
            return
        try:
            count, columns, skipped = parser.converted(self.block)
        except parser.pa.ArrowException as error:
            raise damaged_line(
                file, self.place, f"it cannot be parsed ({' '.join(str(error).split())})", MEND
            ) from None
        except DataError as error:  # of a type
            raise DataError(f"{file.path}: {error.cause}", error.remedy) from None
        self.count = count + len(skipped)
        numbers = np.arange(self.count)
        if skipped:
            numbers = np.delete(numbers, [row.number - 1 for row in skipped])
        if wrong == "raise":
            self._raise(columns, numbers, skipped)
        strays = sum(row.text.strip().encode() == _STRAY for row in skipped)
        lost = {CAUSES[QUOTES]: strays, CAUSES[FIELDS]: len(skipped) - strays}
        place = partial(self._where, number)
        yield from right_batches(columns, number + numbers, place, lost)

    def _raise(
        self, columns: dict[str, ColumnValues], numbers: np.ndarray, skipped: list[Any]
    ) -> None:
        """Raise the error of the first wrong row."""
        value = first_wrong(columns)
        row = None if value is None else int(numbers[value.row])
        if skipped and (row is None or skipped[0].number - 1 < row):
            first = skipped[0]
            raise self._error(
                first.number - 1,
                f"it has {first.actual_columns} fields, but the table has "
                f"{first.expected_columns} columns",
                MEND,
            )
        if value is not None and row is not None:
            raise self._error(row, f"column {value.column!r}: {value.what}", MEND_VALUE)

    def _error(self, row: int, what: str, remedy: str) -> DataError:
        return DataError(f"{self._where(0, row)}: {what}", remedy)

    def _where(self, first: int, number: int) -> str:
        """The file and the line of a record; `first` is the number of the block's first one."""
        quoted = self.portion.quoted_newlines
        place = record_begin(self.block, number - first, quoted_newlines=quoted)
        line = line_at(self.portion.file, self.place) + count_lines(self.block[:place])
        return f"{self.portion.file.path}, line {line}"


def _is_early(array: Any) -> bool:
    """Whether an Arrow array has a date before the year 1, which Arrow takes and Python does not.

    Each date is then looked at as a text, so that it does not matter what else is in its block.
    """
    import pyarrow as pa
    import pyarrow.compute

    if not pa.types.is_timestamp(array.type):
        return False
    least = pyarrow.compute.min(array.cast(pa.int64())).as_py()
    return least is not None and least < FIRST_DATE


def _is_utf8(block: bytes) -> bool:
    if block.isascii():
        return True
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _without(block: bytes, stray: np.ndarray, columns: int) -> bytes:
    """A block in which a row of another number of fields stands for each line with stray quotes."""
    lines = block.split(FEED)
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord(FEED))
    for line in np.unique(np.searchsorted(ends, stray)).tolist():
        lines[line] = _STRAY if columns > 1 else _STRAY + b",,"
    return FEED.join(lines)
