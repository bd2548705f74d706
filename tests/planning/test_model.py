"""The model of a configuration, as planning and preflight see it: a model of tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpc_train.config import ModelSection
from hpc_train.config.file import load
from hpc_train.data.manifest import FILE_NAME
from hpc_train.data.tables.features import (
    CategoricalFeature,
    NumericFeature,
    TableFeatures,
    TargetValues,
)
from hpc_train.data.tables.schema import MISSING, Column, TableSchema
from hpc_train.data.tables.table_manifest import TableManifest
from hpc_train.errors import ConfigError
from hpc_train.planning.choose import choose
from hpc_train.planning.fits import PlannedJob, check_fits
from hpc_train.planning.model import planned_shape, table_sizes
from hpc_train.planning.schedules import plan
from tests.planning.test_choose import MACHINE

KINDS = ["tabular", "tabular_mlp", "tabular_resnet"]


def features(target):
    return TableFeatures(
        numeric=(
            NumericFeature(name="a", column="a", edges=(-1.0, 0.0, 1.0)),
            NumericFeature(name="b", column="b", edges=(0.0, 2.0)),
        ),
        categorical=(
            CategoricalFeature(name="c", categories=("x", "y"), shares=(0.0, 0.0, 0.5, 0.5)),
        ),
        target=target,
        missing=MISSING,
    )


@pytest.fixture
def table(tmp_path):
    """The folder of a prepared table of which only the manifest is there."""
    target = TargetValues(task="regression", names=("t",))
    kinds = {"a": "numeric", "b": "numeric", "c": "categorical", "t": "numeric"}
    columns = tuple(Column(name=name, kind=kind) for name, kind in kinds.items())
    schema = TableSchema(columns=columns, task="regression", targets=("t",))
    manifest = TableManifest(schema, features(target), 0, 0, {"train": ()})
    (tmp_path / FILE_NAME).write_text(manifest.to_json())
    return tmp_path


def configured(table, kind, *options):
    return load(None, ["--data.path", str(table), "--model.kind", kind, *options])


@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_come_from_the_prepared_table(table, kind):
    shape = planned_shape(configured(table, kind))
    assert shape.sizes.edges == ((-1.0, 0.0, 1.0), (0.0, 2.0))
    assert shape.sizes.codes == (4,)
    assert shape.sizes.outputs == 1
    options = ["--model.quantiles=[0.1, 0.5, 0.9]", "--parallel.pp=2"]
    made = plan(configured(table, kind, *options))
    assert made.sizes == "features: 3; outputs: 3"
    assert all(entry.state_bytes > 0 < entry.activation_bytes for entry in made.schedules)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_does_not_fit_is_told_what_would(table, kind):
    config = configured(table, kind, "--data.batch=1048576", "--parallel.dp=2", "--memory.zero=0")
    job = PlannedJob(config, planned_shape(config), np.zeros((2, 1, 1), np.int64))
    room = job.needed() // 4
    with pytest.raises(ConfigError, match="--data.micro_batch"):
        check_fits(job, room, ["node0"])
    most = job.largest_micro_batch(room)
    assert 1 < most < 1048576 // 2


TABULAR = ModelSection(kind="tabular")


@pytest.mark.parametrize(
    ("task", "values", "outputs"),
    [
        ("classification", {"classes": ("x", "y", "z")}, 3),
        ("classification", {"classes": ("x", "y")}, 2),
        ("regression", {}, 1),
        ("multilabel", {"names": ("s", "t")}, 2),
    ],
)
def test_a_target_says_how_many_outputs_a_model_has(task, values, outputs):
    target = TargetValues(**{"task": task, "names": ("t",), **values})
    assert table_sizes(features(target), TABULAR).outputs == outputs


def test_what_cannot_be_predicted_is_refused():
    target = TargetValues(task="classification", names=("t",), classes=("x", "y"))
    with pytest.raises(ConfigError, match="quantiles is given, but the table's task is classific"):
        table_sizes(features(target), replace(TABULAR, quantiles=[0.5]))
    with pytest.raises(ConfigError, match="nothing to predict"):
        table_sizes(features(None), TABULAR)


def test_a_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="sizes of the table are not known.*no prepared data"):
        planned_shape(configured(tmp_path, "tabular"))
    with pytest.raises(ConfigError, match="sizes of the table are not known: give data.path"):
        planned_shape(load(None, ["--model.kind", "tabular"]))


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_a_table_are_compared(table, kind):
    made = choose(configured(table, kind, "--data.batch=64"), MACHINE, 2, 2, every=True, top=1000)
    found = {(row.dp, row.tp, row.pp) for row in made.layouts}
    assert {(4, 1, 1), (2, 2, 1), (1, 2, 2)} <= found
    assert not any(row.sequence_parallel for row in made.layouts)
