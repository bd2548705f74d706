"""The schema that is found in a table says what its columns hold."""

from __future__ import annotations

import csv
import logging
from datetime import date

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpc_train.data.tables.infer import infer_schema
from hpc_train.data.tables.sources import list_tables
from hpc_train.errors import DataError
from tests.data.prepared import write_csv

COUNT = 200


def columns():
    numbers = range(COUNT)
    return {
        "float": [n / 7 if n % 5 else "NA" for n in numbers],
        "class": [n % 3 for n in numbers],
        "truth": [["true", "False", ""][n % 3] for n in numbers],
        "color": [["red", "green", "dark, blue"][n % 3] for n in numbers],
        "day": [f"2020-01-{1 + n % 28:02}" for n in numbers],
        "moment": [f"2020-01-{1 + n % 28:02}T10:00:00Z" for n in numbers],
        "free": [f"this is\nrow {n}" for n in numbers],
        "empty": ["" for _ in numbers],
        "mixed": [n if n != 77 else "?" for n in numbers],
        "holes": [n % 30 if n % 4 else "-" for n in numbers],
    }


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns())
        writer.writerows(zip(*columns().values(), strict=True))
    return path


def kinds(schema):
    return {column.name: column.kind for column in schema.columns}


def test_kinds_are_found_in_the_texts_of_a_csv_file(table, caplog):
    with caplog.at_level(logging.INFO, "hpc_train"):
        schema = infer_schema(list_tables([table]))
    assert kinds(schema) == {
        "float": "numeric",
        "class": "numeric",
        "truth": "numeric",
        "color": "categorical",
        "day": "date",
        "moment": "date",
        "free": "ignored",
        "empty": "ignored",
        "mixed": "numeric",
        "holes": "categorical",
    }
    assert "column 'free' is ignored: 200 of its 200 sampled values" in caplog.text
    assert "column 'empty' is ignored" in caplog.text
    assert "column 'mixed' is numeric, but some values are not, as '?'" in caplog.text
    assert "column 'holes' is categorical, because '-' is no number, as all its" in caplog.text
    assert "counts as a missing value" not in caplog.text


def test_records_of_any_length_are_sampled_and_few_columns_are_told(tmp_path, caplog):
    numbers = {f"number {n}": [n + row / 7 for row in range(30)] for n in range(600)}
    numbers["text"] = [f"{row:x<200000}" for row in range(30)]
    empty = {f"empty {n}": [""] * 30 for n in range(40)}
    path = write_csv(tmp_path / "a.csv", numbers | empty | {"y": [*range(30)]})
    for files in ([path], [path, write_csv(tmp_path / "b.csv", numbers | empty | {"y": [5] * 30})]):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hpc_train"):
            schema = infer_schema(list_tables(files), targets=["y"])
        assert schema.task == "regression"  # few records have too few different numbers for it
        assert [*kinds(schema).values()].count("numeric") == 601
        assert sum("it has no value" in one for one in caplog.messages) == 10
        assert "the same is true of 30 more columns" in caplog.text


def test_only_where_a_file_has_no_nulls_texts_count_as_missing_and_are_told(tmp_path, caplog):
    named = ["None", "mild", "NA", "severe"] * 50
    table = {"grade": named, "country": named[::-1], "x": ["1", "NA"] * 100}
    write_csv(tmp_path / "a.csv", table)
    np.savez(tmp_path / "a.npz", **table)
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    for name in ("a.csv", "a.npz"):
        caplog.clear()
        schema = infer_schema(list_tables([tmp_path / name]), targets=["grade"])
        assert {"", "NA", "None"} < {*schema.missing}
        assert schema.kind("x") == "numeric"
        for text in ("None", "NA"):
            has = f"column 'grade', column 'country' have the text '{text}', which counts as a mis"
            assert has in caplog.text
        assert "'x'" not in caplog.text
    caplog.clear()
    assert infer_schema(list_tables([tmp_path / "a.parquet"]), targets=["grade"]).missing == ("",)
    assert not caplog.records


def test_the_index_of_a_pandas_table_is_no_feature_but_may_have_a_role(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    frame = pd.DataFrame({"x": np.arange(40.0), "__index_level_7__": range(40)})
    frame.sample(frac=1.0, random_state=0).to_parquet(tmp_path / "a.parquet")
    files = list_tables([tmp_path / "a.parquet"])
    frame.to_csv(tmp_path / "a.csv")
    for path in (tmp_path, tmp_path / "a.csv"):  # a table of both formats, and one of csv
        assert infer_schema(list_tables([path])).kind("__index_level_0__") == "ignored"
    assert "'__index_level_0__' is ignored: it has no name, so it is taken for" in caplog.text
    caplog.clear()
    wanted = {"x": "numeric", "__index_level_7__": "numeric", "__index_level_0__": "ignored"}
    assert kinds(infer_schema(files)) == wanted
    assert "column '__index_level_0__' is ignored: it is the index of a pandas" in caplog.text
    assert infer_schema(files, time="__index_level_0__").kind("__index_level_0__") == "numeric"


def test_kinds_are_those_of_the_types_of_parquet(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    rows = pa.table(
        {
            "i": range(COUNT),
            "f": np.ones(COUNT, np.float32),
            "b": [True, False] * (COUNT // 2),
            "d": [date(2020, 1, 1)] * COUNT,
            "t": ["x", "y"] * (COUNT // 2),
            "n": ["1", "2"] * (COUNT // 2),
            "l": [[1]] * COUNT,
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    assert kinds(infer_schema(list_tables([tmp_path]))) == {
        "i": "numeric",
        "f": "numeric",
        "b": "numeric",
        "d": "date",
        "t": "categorical",
        "n": "numeric",
        "l": "ignored",
    }
    assert "column 'l' is ignored: it is of type list<element: int64>" in caplog.text


@pytest.mark.parametrize(
    ("targets", "task", "kind"),
    [
        (["class"], "classification", "categorical"),
        (["truth"], "classification", "categorical"),
        (["color"], "classification", "categorical"),
        (["float"], "regression", "numeric"),
        (["mixed"], "regression", "numeric"),
        (["class", "truth"], "multilabel", "numeric"),
        ([], "none", "numeric"),
    ],
)
def test_the_task_is_that_of_the_target(table, targets, task, kind, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    schema = infer_schema(list_tables([table]), targets=targets)
    told = "class has 3 different whole numbers: they are taken as classes" in caplog.text
    assert told == (targets == ["class"])
    assert schema.task == task
    assert all(schema.kind(name) == kind for name in targets)


def test_roles_have_columns_that_suit_them(table):
    files = list_tables([table])
    schema = infer_schema(
        files, targets=["class"], task="regression", group="free", time="day", weight="float"
    )
    assert (schema.kind("class"), schema.kind("free")) == ("numeric", "categorical")
    for roles in (
        {"time": "color"}, {"weight": "day"}, {"weight": "absent"}, {"targets": ["absent"]},
        {"targets": ["color"], "task": "regression"},
    ):  # fmt: skip
        with pytest.raises(DataError, match="column"):
            infer_schema(files, **roles)


def test_the_column_that_was_meant_is_named_first(tmp_path):
    path = tmp_path / "a.csv"
    names = [f"feature {n}" for n in range(30)] + ["Churned"]
    path.write_text(f"{','.join(names)}\n{','.join('1' for _ in names)}\n")
    for roles in ({"targets": ["churnd"]}, {"targets": ["Churned"], "weight": "churnd"}):
        with pytest.raises(DataError, match=r"'churnd': did you mean 'Churned'\? Its columns are "):
            infer_schema(list_tables([path]), **roles)


def test_a_file_with_other_columns_is_named(table, tmp_path):
    other = tmp_path / "b.csv"
    names = table.read_text().split("\n")[0].split(",")
    other.write_text(",".join([*names[1:], "new"]) + "\n")
    with pytest.raises(DataError, match=r"b\.csv has no column 'float'"):
        infer_schema(list_tables([table, other]))


def test_the_middle_of_large_files_is_sampled_also_inside_quotes(tmp_path):
    path = tmp_path / "a.csv"
    text = "\n".join(f"line {n}, of a text" for n in range(30))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["n", "late", "text"])
        for n in range(12_000):
            writer.writerow([n, "x" if n > 2000 else "", text if n % 2 else '"' + text])
    schema = infer_schema(list_tables([path]))
    assert kinds(schema) == {"n": "numeric", "late": "categorical", "text": "categorical"}


def test_rows_of_another_number_of_fields_than_the_header_are_told(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,0,\n\n2,1,\n")
    with pytest.raises(DataError, match="a.csv: its rows have 3 fields, but its .* 2 columns"):
        infer_schema(list_tables([tmp_path / "a.csv"]), targets=["y"])
