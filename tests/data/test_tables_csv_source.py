"""csv files: each record is read once, however files are cut; wrong ones are told or counted."""

from __future__ import annotations

import csv
import gzip
import io
import math
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.tables import csv_lines, csv_source
from hpc_train.data.tables.schema import Column, TableSchema
from hpc_train.data.tables.sources import (
    count_quotes,
    cut_tables,
    list_tables,
    read_rows,
    settle_quotes,
)
from hpc_train.errors import DataError

TEXTS = st.text('ab",\n\r é€𝄞', max_size=8)
ROWS = st.lists(st.tuples(TEXTS, st.none() | st.floats(allow_nan=False), TEXTS), max_size=12)
MISSING = ("", "NA", "-999", "1900-01-01")


def schema_of(**kinds) -> TableSchema:
    columns = tuple(Column(name=name, kind=kind) for name, kind in kinds.items())
    return TableSchema(columns=columns, task="none", targets=(), missing=MISSING)


@contextmanager
def small_blocks(block: int, piece: int):
    """Files are read as if they were large: in small blocks and pieces."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(csv_lines, "PARSED_BYTES", block))
        for module in (csv_lines, csv_source):
            stack.enter_context(mock.patch.object(module, "CSV_PIECE_BYTES", piece))
        yield


def portions_of(path, nbytes=1 << 20, *, quoted_newlines=True):
    portions = cut_tables(list_tables([path]), nbytes=nbytes, quoted_newlines=quoted_newlines)
    return settle_quotes(portions, [count_quotes(portion) for portion in portions])


def rows_of(path, schema, nbytes=1 << 20, wrong="raise", *, quoted_newlines=True):
    """All rows of a file as tuples of plain values, and how many were left out for each cause."""
    rows, causes = [], {}
    for portion in portions_of(path, nbytes, quoted_newlines=quoted_newlines):
        numbers = []
        for batch in read_rows(portion, schema, wrong):
            columns = [getattr(c, "texts", lambda c=c: c)() for c in batch.columns.values()]
            rows += zip(*(column.tolist() for column in columns), strict=True)
            numbers += batch.numbers.tolist()
            for cause, count in batch.causes.items():
                causes[cause] = causes.get(cause, 0) + count
        assert numbers == sorted(set(numbers))
    return rows, causes


def same(one, other) -> bool:
    """Whether rows are equal. NaN stands for a missing number."""
    return repr(one) == repr(other)


def written(path: Path, header, rows, *, ends="\n", quoting=csv.QUOTE_ALL, bom=False) -> Path:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=ends, quoting=quoting)
    writer.writerows([header, *rows])
    data = (b"\xef\xbb\xbf" if bom else b"") + text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@given(
    ROWS,
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 20),
    st.sampled_from([("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL), ("\r\n", csv.QUOTE_ALL)]),
    st.booleans(),
)
def test_portions_have_each_record_once(rows, portion, block, piece, how, bom):
    table = schema_of(**{"one\n": "categorical", "number": "numeric", "two": "categorical"})
    expected = [
        (a if a.strip() else None, math.nan if n is None else n, b if b.strip() else None)
        for a, n, b in rows
    ]
    header = [column.name for column in table.columns]
    with tempfile.TemporaryDirectory() as folder, small_blocks(block, piece):
        for name in ("a.csv", "b.csv.gz"):
            path = written(Path(folder, name), header, rows, ends=how[0], quoting=how[1], bom=bom)
            found, causes = rows_of(path, table, portion)
            assert same(found, expected)
            assert not causes


@given(st.lists(st.text("ab é", min_size=1, max_size=9), max_size=20), st.integers(1, 30))
def test_lines_are_records_without_quoted_newlines(texts, portion):
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "a.csv"), ["x"], [[text] for text in texts])
        whole = rows_of(path, schema_of(x="categorical"), portion, quoted_newlines=False)
    assert whole == ([(text if text.strip() else None,) for text in texts], {})


NUMBERS = st.one_of(
    st.floats().map(repr),
    st.integers(-(10**30), 10**30).map(str),
    st.sampled_from(
        ["1e400", "+1.5", ".5", "5.", "1_000", " 2 ", "inf", "-Infinity", "1e-400", "١٢", "0x10",
         "1,5", "--1", "1e", "nan", "true", "False", "", "NA", "4.35", "2.2250738585072011e-308",
         "123456789012345678901234567890.123456789", "9007199254740993", " NA", "\t",
         "-999", " -999 ", "-9.99e2"]
    ),
)  # fmt: skip


@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_numbers_are_those_of_python(texts):
    """A value has one meaning, however the other values of its block are written."""
    expected, wrong = [], 0
    for text in texts:
        if text.strip() in MISSING:
            expected.append((math.nan,))
        elif text.lower() in ("true", "false"):
            expected.append((float(text.lower() == "true"),))
        else:
            try:
                expected.append((math.nan if float(text) == -999 else float(text),))
            except ValueError:
                wrong += 1
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "a.csv"), ["x"], [[text] for text in texts])
        found, causes = rows_of(path, schema_of(x="numeric"), wrong="count")
    assert same(found, expected)
    assert sum(causes.values()) == wrong


def test_blanks_around_a_missing_value_do_not_matter_whatever_its_column_holds(tmp_path):
    table = schema_of(c="categorical", d="date")
    rows = [(" NA", "1900-01-01"), (" x", " 1900-01-01T00:00"), ("", " NA ")]
    for some in (rows, *([row] for row in rows)):  # each block has one meaning
        found, _ = rows_of(written(tmp_path / "a.csv", ["c", "d"], some), table)
        assert same(found, [(" x" if c == " x" else None, math.nan) for c, _ in some])


def test_dates_are_seconds_since_1970_in_utc(tmp_path):
    texts = {
        "1970-01-02": 86400,
        "1970-01-01 01:00": 3600,
        "1970-01-01T00:00:01.5": 1.5,
        "1970-01-01T00:00Z": 0,
        "1970-01-01T02:00+02:00": 0,
        "1969-12-31": -86400,
        "0001-01-01": -62135596800,
        "9999-12-31T23:59:59.999999": 253402300799.999999,
        "": math.nan,
    }
    table = schema_of(x="date", y="numeric")
    for some in ([*texts], [*texts][:3], [*texts][3:5]):
        path = written(tmp_path / "a.csv", ["x", "y"], [(text, 0) for text in some])
        found, _ = rows_of(path, table)
        assert same(found, [(float(texts[text]), 0.0) for text in some])
    for wrong in ("2024-02-30", "0000-12-31"):
        path = written(tmp_path / "a.csv", ["x", "y"], [(wrong, 0), ("2024-02-29", 0)])
        _, causes = rows_of(path, table, wrong="count")
        assert causes == {"a value is no date of ISO 8601": 1}


WRONG = {
    b"1,2\n": ("has 2 fields, but the table has 3 columns", "another number of fields"),
    b"1,2,3,4\n": ("has 4 fields, but the table has 3 columns", "another number of fields"),
    b"a,x1,c\n": ("column 'n': 'x1' is no number", "a value is no number"),
    b"a\xff,1,c\n": (r"column 'a': 'a\\xff' is not UTF-8", "a value is not UTF-8"),
    b"a\0,1,c\n": (r"column 'a': 'a\x00' has a NUL byte", "a value has a NUL byte"),
    b"\xff,1\n": ("has 2 fields", "another number of fields"),
}


@pytest.mark.parametrize("line", WRONG)
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_wrong_row_is_told_with_its_line_or_counted(tmp_path, line, name):
    good = b'"q\nr",1.5,"a, b"\r\n\n'  # three lines
    data = b"a,n,c\n" + 50 * good + line + 30 * good
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    table = schema_of(a="categorical", n="numeric", c="categorical")
    for portion, block in ((1 << 20, 1 << 20), (200, 64)):
        with small_blocks(block, 50):
            with pytest.raises(DataError) as caught:
                rows_of(tmp_path / name, table, portion)
            assert f"{name}, line 152: " in caught.value.cause
            assert WRONG[line][0] in caught.value.cause
            assert "--wrong_rows count" in caught.value.remedy
            rows, causes = rows_of(tmp_path / name, table, portion, "count")
        assert rows == 80 * [("q\nr", 1.5, "a, b")]
        assert causes == {WRONG[line][1]: 1}


def test_numbers_of_rows_count_wrong_ones_and_not_blank_lines(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,n\nx,1\n\ny\n\r\n\nz,?\nw,2\nv,3,4\nu,5")
    [portion] = portions_of(tmp_path / "a.csv")
    batches = [*read_rows(portion, schema_of(a="categorical", n="numeric"), "count")]
    texts = [text for batch in batches for text in batch.columns["a"].texts().tolist()]
    numbers = [number for batch in batches for number in batch.numbers.tolist()]
    assert (texts, numbers) == (["x", "w", "u"], [0, 3, 5])
    assert sum(batch.wrong for batch in batches) == 3


@pytest.mark.parametrize(
    ("line", "place"),
    [(b'5" disk,1\n', 4), (b'"a"b,1\n', 4), (b'"open,1\n', 4), (b'"open,1\n"a"b,2\n', 4)],
)
def test_stray_quotes_are_told_or_belong_to_one_line(tmp_path, line, place):
    data = b"a,n\n" + 2 * b"x,1\n" + line + 3 * b"y,2\n"
    (tmp_path / "a.csv").write_bytes(data)
    table = schema_of(a="categorical", n="numeric")
    for portion in (1 << 20, 5):
        for wrong in ("raise", "count"):
            with pytest.raises(DataError, match=r"a\.csv, line \d+: .*quote") as caught:
                rows_of(tmp_path / "a.csv", table, portion, wrong)
            assert "--no_quoted_newlines" in caught.value.remedy
        with pytest.raises(DataError, match=f"line {place}: a quote in a wrong place"):
            rows_of(tmp_path / "a.csv", table, portion, quoted_newlines=False)
        rows, causes = rows_of(tmp_path / "a.csv", table, portion, "count", quoted_newlines=False)
        assert rows == [("x", 1.0)] * 2 + [("y", 2.0)] * 3
        assert causes == {"a quote in a wrong place": line.count(b"\n")}


def test_the_header_names_each_column_once(tmp_path):
    for data, cause in {
        b"": "is empty",
        b"\xef\xbb\xbf\n\n": "is empty",
        b"1,1\n2,3\n": "two columns named '1'",
        b"a,,c\n1,2,3\n": "column 2 has no name",
        b"\xff,b\n": "not UTF-8",
        b'"a,b\n1,2\n': "does not name its columns",
        b"PAR1\0\n": "does not begin like",
        "a,b\n".encode("utf-16"): "is in UTF-16: convert it to UTF-8",
        b"a,c\n1,2\n": "no column 'b'",
        b"a,b,c\n1,2,3\n": "the column 'c'",
    }.items():
        (tmp_path / "a.csv").write_bytes(data)
        with pytest.raises(DataError, match=cause):
            rows_of(tmp_path / "a.csv", schema_of(a="numeric", b="numeric"))


def test_columns_may_have_another_order_and_ignored_ones_may_hold_anything(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"i\tb\ta\n\xff\t1,5\t2\n\0\tx\t3\n")
    table = schema_of(a="numeric", b="categorical", i="ignored")
    assert rows_of(tmp_path / "a.tsv", table) == ([(2.0, "1,5"), (3.0, "x")], {})


def test_a_carriage_return_alone_ends_a_record(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,n\rx,1\ry,2\r\nz,3\rw,?")
    table = schema_of(a="categorical", n="numeric")
    for portion in (1, 7, 100):
        rows, _ = rows_of(tmp_path / "a.csv", table, portion, "count")
        assert rows == [("x", 1.0), ("y", 2.0), ("z", 3.0)]
    with pytest.raises(DataError, match="line 5"):
        rows_of(tmp_path / "a.csv", table)


def test_a_record_without_end_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a\nx\n" + b"y" * 1000 + b"\nz\n")
    with (
        mock.patch.object(csv_lines, "RECORD_BYTES", 500),
        small_blocks(100, 100),
        pytest.raises(DataError, match="line 3: the record that begins there"),
    ):
        rows_of(tmp_path / "a.csv", schema_of(a="categorical"))


def test_batches_have_a_bounded_number_of_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a\n" + b"1\n" * 150_000)
    [portion] = portions_of(tmp_path / "a.csv")
    batches = [*read_rows(portion, schema_of(a="numeric"))]
    assert [len(batch.numbers) for batch in batches] == [65536, 65536, 150_000 - 2 * 65536]
    assert (np.concatenate([b.numbers for b in batches]) == np.arange(150_000)).all()


def test_damaged_compression_and_changed_files_are_told(tmp_path):
    path = written(tmp_path / "a.csv.gz", ["a"], [[str(n)] for n in range(1000)])
    [portion] = portions_of(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="has changed"):
        [*read_rows(portion, schema_of(a="numeric"))]
    with pytest.raises(DataError, match="is damaged"):
        rows_of(path, schema_of(a="numeric"))
