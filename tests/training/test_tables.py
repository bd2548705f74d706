"""The prepared table of `hpc-train train`, as each node sees it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hpc_train.config.file import load
from hpc_train.data.tables.prepare_table import prepare_table
from hpc_train.data.tables.schema import Column, TableSchema
from hpc_train.data.tables.table_request import TableOptions, table_request
from hpc_train.errors import ConfigError, DataError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.planning.model import planned_shape
from hpc_train.training.planned import job_of
from hpc_train.training.tables import train_table
from tests.conftest import records

TRAINED = [
    *("--run.steps", "6", "--run.log_every", "1", "--run.deterministic", "true"),
    *("--model.kind", "tabular_mlp", "--model.hidden", "8", "--model.members", "2"),
    *("--data.batch", "24", "--precision.dtype", "float64", "--data.validation_every", "3"),
]


def small_table(folder, task="classification", validation=0.25):
    """Prepare a table of two numbers and a class that is rare, into a folder."""
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(400, 2))
    lines = ["size,weight,kind", *(f"{a:.4f},{b:.4f},{int(a + b > 1.5)}" for a, b in numbers)]
    source = folder.with_suffix(".csv")
    source.write_text("\n".join(lines) + "\n")
    columns = [Column(name=name, kind="numeric") for name in ("size", "weight", "kind")]
    targets = () if task == "none" else ("kind",)
    schema = TableSchema(columns=tuple(columns), task=task, targets=targets)
    options = TableOptions(validation=validation)
    return prepare_table(table_request([source], folder, schema, options))


@pytest.mark.mpi
@pytest.mark.parametrize("sampling", [pytest.param("natural", marks=pytest.mark.long), "balanced"])
def test_a_cache_changes_no_number_and_is_gone_at_the_end(job, together, sampling):
    if job.world.rank == 0:
        small_table(together / "data")
    job.world.barrier()
    found = []
    for name, options in (("plain", []), ("cached", ["--data.cache", str(together / "cache")])):
        places = ["--data.path", str(together / "data"), "--run.dir", str(together / name)]
        train_table(load(None, [*TRAINED, *places, "--data.sampling", sampling, *options]), job)
        job.world.barrier()
        keys = ("loss", "validation_loss", "validation_auc", "validation_accuracy")
        found.append([[record.get(key) for key in keys] for record in records(together / name)])
    left = [*(together / "cache").iterdir()]
    job.world.barrier()
    assert found[0] == found[1]
    assert left == []


@pytest.mark.mpi
def test_a_damaged_copy_on_one_nodes_own_disk_is_refused_on_all(job, tmp_path, monkeypatch):
    """Each rank stands for a node: it is alone on its own, and `data` is a folder of its own."""
    monkeypatch.chdir(tmp_path)
    last = job.world.size - 1
    small_table(tmp_path / "data")
    if job.world.rank == last:
        os.truncate("data/train-00000.h5", 3000)
    config = load(None, [*TRAINED, "--data.path", "data", "--run.dir", "run"])
    with pytest.raises(DataError, match=r"train-00000\.h5 has 3000 bytes") as caught:
        train_table(config, Runtime(job.world, Group(waiting=job.world.waiting)))
    assert f"rank {last} " in str(caught.value) or job.world.size == 1


@pytest.mark.mpi
def test_the_memory_of_a_job_is_predicted_from_its_folder(job, tmp_path):
    small_table(tmp_path / "data")
    config = load(None, [*TRAINED, "--data.path", str(tmp_path / "data")])
    shape = planned_shape(config)
    assert shape.sizes.outputs == 2
    planned = job_of(config, shape, job)
    assert planned.config.memory.zero == int(job.world.size > 1)
    assert planned.needed() > 0


def test_a_table_without_a_target_is_refused(tmp_path):
    small_table(tmp_path / "data", "none")
    config = load(None, [*TRAINED, "--data.path", str(tmp_path / "data")])
    with pytest.raises(ConfigError, match="the table was prepared without a target"):
        train_table(config, Runtime(Group(), Group()))


def test_a_table_without_held_out_rows_is_trained_on(tmp_path):
    small_table(tmp_path / "data", validation=0.0)
    places = ["--data.path", str(tmp_path / "data"), "--run.dir", str(tmp_path / "run")]
    alone = Runtime(Group(), Group())
    with pytest.raises(ConfigError, match="data.validation_every is 3, but nothing is held out"):
        train_table(load(None, [*TRAINED, *places]), alone)
    train_table(load(None, [*TRAINED, *places, "--data.validation_every", "0"]), alone)
    assert "validation_loss" not in records(tmp_path / "run")[-1]
