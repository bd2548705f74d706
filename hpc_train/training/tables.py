"""Trains a model of tables on what `hpc-train prepare table` wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpc_train.config import DataSection, RunConfig
from hpc_train.data.manifest import SPLITS
from hpc_train.data.tables.dataset import TableDataset
from hpc_train.data.tables.table_manifest import read_table_manifest
from hpc_train.errors import ConfigError
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.planned import check_same_program, job_that_fits, train_planned
from hpc_train.training.samples import node_caches
from hpc_train.training.substituted import check_each_shard
from hpc_train.training.table_task import table_shape, table_task
from hpc_train.training.table_transfer import features_to_read


def train_table(config: RunConfig, runtime: Runtime) -> None:
    """Train a model of tables, from the data folder to the last checkpoint. Collective.

    Raises:
        Stopped: a signal, the stop file or the time limit stopped it, with a checkpoint.
        HpcTrainError: a part of the job failed; the same error is raised on all ranks.
    """
    group = runtime.world
    check_same_program(config, group)
    with agreed(group):
        directory = table_folder(config.data)
        manifest = read_table_manifest(directory)
    same(group, f"the data in {directory}", manifest.digest, "copy the same data to all nodes")
    check_each_shard(runtime, directory, manifest)
    features = features_to_read(config, manifest.features, group)
    with agreed(group):
        shape = table_shape(config, features)
    job, most = job_that_fits(config, shape, runtime)
    with node_caches(config.data, {directory: manifest.digest}, group) as caches:
        with agreed(group):
            how: Any = {"dtype": getattr(torch, config.precision.parameters), "read_as": features}
            training, held_out = (
                TableDataset(directory, manifest, split, caches.get(directory), **how)
                if manifest.rows(split)
                else None
                for split in SPLITS
            )
        task = table_task(config, features, training, held_out, group)
        assert task.about is not None
        whole = replace(
            task,
            identity={"data": manifest.digest, **task.identity},
            about={**task.about, "schema": manifest.schema.to_yaml()},
            most_at_a_time=most,
        )
        train_planned(config, whole, runtime, job)


def table_folder(section: DataSection) -> Path:
    """The folder of a configuration's table.

    Raises:
        ConfigError: there is none, or there are several.
    """
    folders = [*section.folders]
    if not folders:
        raise ConfigError("data.path is not given", "give the folder of `hpc-train prepare table`")
    if len(folders) > 1:
        raise ConfigError(
            f"data.path names {len(folders)} folders, but a model of tables is trained on one",
            "prepare all files together: `hpc-train prepare table FILE FILE ...`",
        )
    return Path(folders[0])
