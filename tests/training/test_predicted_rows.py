from __future__ import annotations

import numpy as np
import pytest

from hpc_train.data.tables.features import Categories, TargetValues
from hpc_train.data.tables.schema import Column, TableSchema
from hpc_train.data.tables.sources import cut_tables, read_rows
from hpc_train.data.tables.table_files import TableFile, as_text
from hpc_train.training.predicted_rows import PredictionColumns


@pytest.mark.parametrize("classes", [("False", "True"), ("false", "true")])
def test_truth_values_are_scored_however_a_format_writes_them(classes):
    target = TargetValues(task="classification", names=("y",), classes=classes, shares=(0.5, 0.5))
    columns = PredictionColumns(target, (), scored=True)
    truth = Categories(np.array([0, 1, 2, 3, -1], np.int32), ("true", "False", "TRUE ", "maybe"))
    made = columns.batch(np.arange(5), {"y": truth}, np.full((5, 2), 0.5))
    assert columns.scored_rows(made)["target"].tolist() == [1, 0, 1]
    assert columns.of_unknown_class(made) == 1


def copied(path, form):
    """A column of numbers of a file, as its predictions copy it."""
    about = path.stat()
    x = Column(name="x", kind="numeric")
    schema = TableSchema(columns=(x,), task="none", targets=(), missing=("", "-999"))
    [portion] = cut_tables([TableFile(str(path), about.st_size, about.st_mtime_ns, form)])
    [rows] = read_rows(portion, schema, texts=("x",))
    target = TargetValues(task="regression", names=("y",))
    columns = PredictionColumns(target, (), {"x": "numeric"})
    values = {name: rows.columns[name] for name in ("x", as_text("x"))}
    made = columns.batch(rows.numbers, values, np.zeros(len(rows.numbers)))
    fitting = {"x": {"int64", "float64", "string"}}
    columns.narrow(fitting, made)
    return fitting["x"], made.column("x").field("float64").to_pylist()


def test_copies_of_small_floats_have_the_stored_values(tmp_path):
    values = np.array([0.12573022, 1 / 3, 1e10, np.nan], np.float32)
    np.savez(tmp_path / "t.npz", x=values)
    types, made = copied(tmp_path / "t.npz", "npz")
    assert types == {"float64", "string"}
    assert made == [*values[:3].astype(np.float64).tolist(), None]


def test_missing_numbers_are_missing_in_copies_however_they_are_written(tmp_path):
    (tmp_path / "t.csv").write_text("x\n-999.0\n0.5\n -999\n-9.99e2\n2\n", encoding="utf-8")
    assert copied(tmp_path / "t.csv", "csv")[1] == [None, 0.5, None, None, 2.0]
