"""How a run reads its table if it starts from the weights of a model of another table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.catalogue import find_checkpoints
from hpc_train.checkpoint.weight_sources import about_of
from hpc_train.config import RunConfig
from hpc_train.data.tables.features import TableFeatures
from hpc_train.data.tables.transfer import with_statistics_of
from hpc_train.errors import CheckpointError, CheckpointMismatch
from hpc_train.mpi.agreement import from_first
from hpc_train.mpi.group import Group


def features_to_read(config: RunConfig, features: TableFeatures, group: Group) -> TableFeatures:
    """The features of a run's table. Those that its weights know keep their statistics. Collective.

    A run that goes on reads its table as its own checkpoints tell, so the weights need not be there
    any more.

    Args:
        config: the configuration.
        features: the features with which the table was prepared.
        group: all ranks of the job.

    Raises:
        HpcTrainError: the weights cannot be read; on all ranks.
    """
    if not config.checkpoint.weights:
        return features
    about = from_first(group, lambda: _about(config))
    if "features" not in about:
        return features
    return with_statistics_of(features, TableFeatures.from_tree(about["features"]))


def _about(config: RunConfig) -> Mapping[str, Any]:
    if config.checkpoint.resume == "auto":
        for path in find_checkpoints(Path(config.run.dir) / "checkpoints", "auto"):
            try:
                return about_of(path)
            except (CheckpointError, CheckpointMismatch):
                continue  # resuming skips it, too
    return about_of(Path(config.checkpoint.weights))
