"""Tables of all formats give the same rows, however their files are cut."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, date, datetime
from decimal import Decimal

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_train.data import fork_server
from hpc_train.data.arrays.indexing import write_index
from hpc_train.data.tables.infer import infer_schema
from hpc_train.data.tables.schema import Column, TableSchema
from hpc_train.data.tables.sources import cut_tables, list_tables, read_rows, table_columns
from hpc_train.data.tables.table_files import BATCH_ROWS, as_text
from hpc_train.errors import DataError, SetupError, UserError
from hpc_train.warm.meeting import Cold


def schema_of(**kinds) -> TableSchema:
    columns = tuple(Column(name=name, kind=kind) for name, kind in kinds.items())
    return TableSchema(columns=columns, task="none", targets=())


def rows_of(path, schema, nbytes=1 << 20, wrong="raise"):
    rows = []
    for portion in cut_tables(list_tables([path]), nbytes=nbytes):
        numbers = []
        for batch in read_rows(portion, schema, wrong):
            assert len(batch.numbers) <= BATCH_ROWS
            numbers += batch.numbers.tolist()
            columns = [getattr(c, "texts", lambda c=c: c)() for c in batch.columns.values()]
            rows += zip(*(column.tolist() for column in columns), strict=True)
        assert numbers == [*range(len(numbers))] or wrong == "count"
    return rows


def made(count):
    """Columns of numbers, texts and dates, and the rows that they have."""
    random = np.random.default_rng(0)
    numbers, small = random.normal(size=count), random.integers(-5, 5, count).astype(np.int16)
    texts = np.array(["red", "green", "NA"])[random.integers(0, 3, count)]
    dates = np.datetime64("2000-01-01", "s") + random.integers(0, 10**8, count)
    raw = {"number": numbers, "small": small, "text": texts, "when": dates}
    seconds = dates.astype(np.int64).astype(float)
    expected = zip(
        numbers.tolist(),
        small.astype(float).tolist(),
        [None if text == "NA" else text for text in texts.tolist()],
        seconds.tolist(),
        strict=True,
    )
    return raw, [*expected]


KINDS = {"number": "numeric", "small": "numeric", "text": "categorical", "when": "date"}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_of_arrays_are_read_in_any_portions(tmp_path, save):
    raw, expected = made(70_000)
    save(tmp_path / "a.npz", **raw)
    for nbytes in (1 << 30, 300_001):
        assert rows_of(tmp_path / "a.npz", schema_of(**KINDS), nbytes) == expected


def test_parquet_is_read_in_any_portions(tmp_path):
    raw, expected = made(70_000)
    for number, options in enumerate(
        [{}, {"row_group_size": 9999, "use_dictionary": False}, {"row_group_size": 20_000}]
    ):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(raw), path, **options)
        for nbytes in (1 << 30, 1000):
            assert rows_of(path, schema_of(**KINDS), nbytes) == expected


def test_a_matrix_is_a_column_for_each_of_its_columns(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.arange(6.0).reshape(3, 2), y=np.array([True, False, True]))
    table = schema_of(X_0="numeric", X_1="numeric", y="categorical")
    assert rows_of(tmp_path / "a.npz", table, 1) == [
        (0.0, 1.0, "True"),
        (2.0, 3.0, "False"),
        (4.0, 5.0, "True"),
    ]


def portion_of(path, numbers):
    """The only portion of a new table whose column `n` has these numbers."""
    if path.suffix == ".csv":
        path.write_text("n\n" + "".join(f"{number}\n" for number in numbers))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"n": numbers}), path)
    elif path.suffix == ".npz":
        np.savez(path, n=numbers)
    else:
        with h5py.File(path, "w") as file:
            file["n"] = numbers
    [portion] = cut_tables(list_tables([path]))
    return portion


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.npz", "a.h5"])
def test_a_column_of_numbers_is_read_as_texts_too(tmp_path, name):
    numbers = (1 << 60) + np.arange(3)
    portion = portion_of(tmp_path / name, numbers)
    [batch] = read_rows(portion, schema_of(n="numeric"), texts=["n"])
    assert batch.columns["n"].tolist() == [float(1 << 60)] * 3
    assert batch.columns[as_text("n")].texts().tolist() == [*map(str, numbers)]


def test_whole_numbers_with_a_fill_value_keep_all_their_digits(tmp_path):
    numbers = (1 << 53) + 1 + np.arange(4)
    numbers[2] = -1
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["n"] = numbers
        file["n"].attrs["_FillValue"] = -1
    texts = [None if number < 0 else str(number) for number in numbers]
    assert rows_of(tmp_path / "a.h5", schema_of(n="categorical")) == [(text,) for text in texts]
    found = [value for (value,) in rows_of(tmp_path / "a.h5", schema_of(n="numeric"))]
    assert np.isnan(found).tolist() == [False, False, True, False]
    assert found[0] == float(numbers[0])


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.npz", "a.h5"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, name):
    numbers = np.arange(3 * BATCH_ROWS)
    portion = portion_of(tmp_path / name, numbers)
    batches = read_rows(portion, schema_of(n="numeric"))
    next(batches)
    os.utime(tmp_path / name)
    with pytest.raises(DataError, match="has changed since it was"):
        list(batches)


def test_archives_that_are_no_tables_are_refused(tmp_path):
    for arrays, cause in {
        "objects": ({"a": np.array(["x", None], object)}, "Python objects"),
        "lengths": ({"a": np.ones(2), "b": np.ones(3)}, "different lengths"),
        "axes": ({"a": np.ones((2, 2, 2))}, "shape"),
        "names": ({"a_0": np.ones(2), "a": np.ones((2, 1))}, "two columns named 'a_0'"),
        "order": ({"a": np.asfortranarray(np.ones((2, 2)))}, "Fortran"),
    }.values():
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(DataError, match=cause):
            cut_tables(list_tables([tmp_path / "a.npz"]))


def test_numbers_in_categorical_columns_have_one_text(tmp_path):
    table = pa.table(
        {
            "float": [1.0, -0.0, 0.1, None, 1e300],
            "int": [1, 0, -1, None, 2**60 + 1],
            "truth": [True, False, None, True, True],
            "day": [date(2020, 1, 2), None, None, None, None],
            "decimal": [Decimal("1.50"), None, None, None, None],
            "dictionary": pa.array(["1", "0", None, "NA", "1"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    rows = rows_of(
        tmp_path / "a.parquet", schema_of(**dict.fromkeys(table.column_names, "categorical"))
    )
    assert rows == [
        ("1", "1", "True", "2020-01-02", "1.5", "1"),
        ("0", "0", "False", None, None, "0"),
        ("0.1", "-1", None, None, None, None),
        (None, None, "True", None, None, None),
        ("1e+300", str(2**60 + 1), "True", None, None, "1"),
    ]


def test_types_of_parquet_become_numbers_and_dates(tmp_path):
    moment = datetime(2020, 1, 2, 3, 4, 5, 250_000, tzinfo=UTC)
    table = pa.table(
        {
            "big": pa.array([2**63 - 1, None]),
            "half": pa.array(np.array([1.5, np.nan], np.float16)),
            "truth": pa.array([True, None]),
            "decimal": pa.array([Decimal("7.31"), None]),
            "text": pa.array(["+1_0", "NA"]),
            "day": pa.array([date(1970, 1, 2), None]),
            "zone": pa.array([moment, None], pa.timestamp("ns", "Europe/Berlin")),
            "iso": pa.array(["2020-01-02T03:04:05.25", ""]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    names = table.column_names
    kinds = {name: "date" if name in ("day", "zone", "iso") else "numeric" for name in names}
    first, second = rows_of(tmp_path / "a.parquet", schema_of(**kinds))
    assert first == (2.0**63, 1.5, 1.0, 7.31, 10.0, 86400.0, moment.timestamp(), moment.timestamp())
    assert np.isnan(second).all()


def test_a_column_without_values_in_a_file_is_missing_there_whatever_it_holds(tmp_path):
    pq.write_table(pa.table({"a": [date(2020, 1, 2)] * 9}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": pa.nulls(2)}), tmp_path / "b.parquet")
    assert infer_schema(list_tables([tmp_path])).kind("a") == "date"
    for kind in ("numeric", "categorical", "date"):
        rows = rows_of(tmp_path / "b.parquet", schema_of(a=kind))
        assert len(rows) == 2
        assert all(one is None or one != one for (one,) in rows)


def test_equal_values_have_one_text_whatever_their_type(tmp_path):
    """So groups and categories are the same in files that other programs have written."""
    days = np.array(["2024-01-01", "2024-01-01T12:30", "NaT"], "datetime64[s]")
    tenths, whole = np.array([0.1, 2.0, np.nan]), np.array([2, 10**16, 7])
    cents = [Decimal("0.10"), Decimal("2.00"), None]
    texts = {
        "day": ["2024-01-01", "2024-01-01T12:30:00", None],
        "tenths": ["0.1", "2", None],
        "whole": ["2", "10000000000000000", "7"],
        "large": ["123456792", "0", "16777216"],
    }
    large = np.array([123456792, 0, 1 << 24])
    tens = pa.array([Decimal(int(number)) for number in whole])
    cents = pa.array(cents, pa.decimal128(9, 2))
    narrow = large.astype(np.float32)
    files = {
        "ms": (
            days.astype("datetime64[ms]"),
            tenths.astype(np.float32),
            whole.astype(float),
            narrow,
        ),
        "us": (days.astype("datetime64[us]"), cents, whole, large),
        "ns": (days.astype("datetime64[ns]"), tenths, tens, large.astype(float)),
    }
    for name, columns in files.items():
        table = pa.table([pa.array(column) for column in columns], [*texts])
        pq.write_table(table, tmp_path / f"{name}.parquet")
        if name != "us" and all(isinstance(column, np.ndarray) for column in columns):
            np.savez(tmp_path / f"{name}.npz", **dict(zip(texts, columns, strict=True)))
    schema = schema_of(**dict.fromkeys(texts, "categorical"))
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 4
    for path in paths:
        assert rows_of(path, schema) == [*zip(*texts.values(), strict=True)], path.name


def test_truth_values_have_one_text_in_all_formats(tmp_path):
    truth = np.arange(6) % 3 == 0
    rows = np.zeros(6, [("one", "?"), ("two", "?", (2,))])
    rows["one"], rows["two"] = truth, np.stack([~truth, truth], 1)
    columns = {"one": truth, "two_0": ~truth, "two_1": truth}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("table", data=rows)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        for name, column in columns.items():
            file[name] = column
    np.savez(tmp_path / "c.npz", **columns)
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    (tmp_path / "b.h5").rename(tmp_path / "indexed.h5")
    write_index(tmp_path / "indexed.h5")
    schema = schema_of(one="categorical", two_0="categorical", two_1="numeric")
    expected = [(str(value), str(not value), float(value)) for value in truth]
    paths = [path for path in sorted(tmp_path.iterdir()) if path.suffix != ".json"]
    assert len(paths) == 4
    for path in paths:
        assert rows_of(path, schema) == expected, path.name


def test_wrong_rows_of_parquet_are_told_with_their_number_or_counted(tmp_path):
    texts = ["1"] * 250 + ["x"] + ["2"] * 50
    table = pa.table({"n": texts, "b": pa.array([b"\xff"] * 2 + [b"y"] * 299)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    with pytest.raises(DataError, match=r"a\.parquet, row 251, column 'n': 'x' is no number"):
        rows_of(tmp_path / "a.parquet", schema_of(n="numeric", b="ignored"))
    assert (
        len(rows_of(tmp_path / "a.parquet", schema_of(n="numeric", b="ignored"), 1, "count")) == 300
    )
    with pytest.raises(DataError, match=r"row 1, column 'b': .* is not UTF-8"):
        rows_of(tmp_path / "a.parquet", schema_of(n="ignored", b="categorical"))


def test_a_type_that_does_not_suit_its_kind_is_told(tmp_path):
    table = pa.table({"n": [[1], [2]], "d": [date(2020, 1, 2)] * 2, "f": [1.0, 2.0]})
    pq.write_table(table, tmp_path / "a.parquet")
    for kinds in ({"n": "categorical"}, {"d": "numeric"}, {"f": "date"}):
        schema = schema_of(**{"n": "ignored", "d": "ignored", "f": "ignored"} | kinds)
        with pytest.raises(DataError, match=f"column '{next(iter(kinds))}' is of type"):
            rows_of(tmp_path / "a.parquet", schema)


def test_hdf5_columns_are_datasets_of_one_axis(tmp_path, caplog):
    numbers = np.arange(70_000.0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("table")
        group["x"] = numbers
        group.create_dataset("n", data=np.arange(70_000) % 3, chunks=(1000,), compression="gzip")
        group["picture"] = np.ones((2, 2))
        group["text"] = ["x", "yy"]
    table = schema_of(n="categorical", x="numeric")
    with caplog.at_level(logging.INFO, "hpc_train"):
        rows = rows_of(tmp_path / "a.h5", table, 300_000)
    assert rows == [(str(n % 3), float(n)) for n in range(70_000)]
    assert "no columns (table/text: its texts have no fixed length. Only" in caplog.text
    assert "table/picture: it has 2 axes); write each column as one dataset of" in caplog.text
    (tmp_path / "b.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:3000])
    with pytest.raises(DataError, match=r"b\.h5"):
        rows_of(tmp_path / "b.h5", table)


def test_a_table_of_hdf5_has_a_column_for_each_field(tmp_path):
    kind = [("n", "<i8"), ("values", ">f4", (2,)), ("text", "S5"), ("truth", "?")]
    rows = np.zeros(1000, kind)
    rows["n"], rows["values"][:, 1] = np.arange(1000), np.arange(1000) / 4
    rows["truth"] = True
    rows["text"] = [text.encode() for text in ["é", "NA"] * 500]
    table = schema_of(
        n="numeric", values_0="ignored", values_1="numeric", text="categorical", truth="numeric"
    )
    for number, options in enumerate([{}, {"chunks": (99,), "compression": "gzip"}]):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("a/table", data=rows, **options)
            file["a/numbers"] = np.arange(3)
        for nbytes in (1 << 20, 100):
            found = rows_of(path, table, nbytes)
            assert found == [
                (float(n), n / 4, "é" if n % 2 == 0 else None, 1.0) for n in range(1000)
            ]


def test_a_rank_reads_hdf5_with_the_workers_that_were_started_before_mpi(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3.0)
    monkeypatch.setattr(fork_server, "_state", None)
    fork_server.start_workers()
    monkeypatch.setattr(fork_server, "mpi_runs", lambda: True)
    assert rows_of(tmp_path / "a.h5", schema_of(x="numeric")) == [(0.0,), (1.0,), (2.0,)]
    (tmp_path / "b.h5").write_bytes((tmp_path / "a.h5").read_bytes())
    monkeypatch.setattr(fork_server, "_state", None)
    monkeypatch.setattr(
        fork_server, "_start_warm", lambda: (_ for _ in ()).throw(Cold("no server"))
    )
    with pytest.raises(UserError, match="start_workers"):
        cut_tables(list_tables([tmp_path / "b.h5"]))


def test_texts_of_hdf5_without_a_fixed_length_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = ["x", "yy"]
    with pytest.raises(
        DataError, match="its texts have no fixed length.* in tables texts of fixed length"
    ):
        table_columns(list_tables([tmp_path / "a.h5"])[0])


def test_folders_are_searched_for_files_of_tables(tmp_path, caplog):
    for name in (
        "b/x.CSV.gz",
        "b/a.tsv",
        "a.parquet",
        "_SUCCESS",
        "c.csv",
        ".b/c.csv",
        "b/._a.tsv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x\n")
    (tmp_path / "b" / "latest.csv").symlink_to("../c.csv")
    with caplog.at_level(logging.INFO, "hpc_train"):
        found = list_tables([tmp_path / "c.csv", tmp_path], tell=True)
    names = [file.path.removeprefix(f"{tmp_path}/") for file in found]
    assert names == ["c.csv", "a.parquet", "b/a.tsv", "b/x.CSV.gz"]
    assert [file.delimiter for file in found] == [",", ",", "\t", ","]
    assert "skipped 1 file " in caplog.text
    assert "left out 1 path to a file that other paths lead to, too" in caplog.text
    for path, cause in {"none.csv": "does not exist", "_SUCCESS": "is not one of"}.items():
        with pytest.raises(DataError, match=cause):
            list_tables([tmp_path / path])


def test_portions_are_plain_values(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x\n1\n")
    [portion] = cut_tables(list_tables([tmp_path / "a.csv"]))
    assert json.loads(json.dumps(asdict(portion)))["file"]["nbytes"] == 4


def test_without_pyarrow_arrays_are_read_and_others_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    np.savez(tmp_path / "a.npz", x=np.ones(2))
    assert rows_of(tmp_path / "a.npz", schema_of(x="numeric")) == [(1.0,), (1.0,)]
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "a.csv").write_bytes(b"x\n1\n")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(SetupError, match=r"pip install 'hpc_train\[arrow\]'"):
            rows_of(tmp_path / name, schema_of(x="numeric"))


def test_tables_are_read_without_torch():
    code = "import sys, hpc_train.data.tables.infer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_columns_of_a_file_are_told(tmp_path):
    pq.write_table(pa.table({"b": [1], "a": [2]}), tmp_path / "a.parquet")
    assert table_columns(list_tables([tmp_path / "a.parquet"])[0]) == ["b", "a"]
