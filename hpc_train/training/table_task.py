"""The task of training a model of tables: model, loss, scores, and how rows are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from hpc_train.config import DataSection, RunConfig
from hpc_train.data.tables.balanced import BalancedClasses, class_dtype
from hpc_train.data.tables.features import TableFeatures, TargetValues
from hpc_train.errors import ConfigError
from hpc_train.models.shape import Shape
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group
from hpc_train.planning.model import division_of, shape_of, table_sizes
from hpc_train.training.importance import report_importance
from hpc_train.training.pretraining import CorruptedRows, MaskedCells
from hpc_train.training.table_losses import TableLoss, check_has_classes
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

ROWS_AT_ONCE = 1 << 16  # rows that are read together to learn their classes


def table_task(
    config: RunConfig, features: TableFeatures, training: Any, held_out: Any, group: Group
) -> TrainingTask:
    """The model of a configuration, its loss, its scores and its data. Collective.

    `about` of its checkpoints has all that a reader needs to predict with the model.

    Args:
        config: the configuration.
        features: the features of the table, and its target.
        training: the training rows, a data set whose `fetch` returns numeric and categorical
            features, target and weight, as that of `TableDataset`.
        held_out: the held-out rows; None: there are none.
        group: all ranks of the job.

    Raises:
        ConfigError: keys of the configuration do not fit the table; on all ranks.
        DataError: rows cannot be read; on all ranks.
    """
    with agreed(group):
        if config.data.importance and held_out is None:
            raise ConfigError(
                f"data.importance is {config.data.importance}, but no rows are held out",
                "prepare the table with --validation above 0, or leave data.importance out",
            )
        loss, shape = loss_of(config, features), table_shape(config, features)
    training = sampled(config.data, training, features.target, group)
    with agreed(group):
        torch.manual_seed(config.run.seed)
        dtype = getattr(torch, config.precision.parameters)
        model = shape.build_unfilled(dtype)  # each rank fills its part when the layout is known
        table = {
            "quantiles": config.model.quantiles,
            "pretraining": config.model.pretraining,
            "features": features.to_tree(),
        }
        model.table = table  # by which it takes the weights of other tables' models
    return TrainingTask(
        model,
        training,
        loss,
        validation=held_out,
        scores=loss if isinstance(loss, TableLoss) else None,
        together=loss.together,
        finish=_finish(config, features),
        identity={
            "model.pretraining": config.model.pretraining,
            "data.sampling": config.data.sampling,
            "model.quantiles": config.model.quantiles,
            **shape.identity,
        },
        about={
            "kind": config.model.kind,
            "shape": asdict(shape),
            "dtype": config.precision.parameters,
            **table,
        },
        private_parameters=True,
        shape=shape,
    )


def _finish(config: RunConfig, features: TableFeatures) -> Callable[[Trainer], None] | None:
    repeats = config.data.importance
    if not repeats:
        return None
    return lambda trainer: report_importance(trainer, features, repeats)


def table_shape(config: RunConfig, features: TableFeatures) -> Shape:
    """The shape of a configuration's model for a table, which its layout can divide.

    Raises:
        ConfigError: keys of the configuration do not fit the table's task, or the layout.
    """
    loss_of(config, features)
    shape = shape_of(config.model, table_sizes(features, config.model))
    shape.check(division_of(config.parallel))
    return shape


def loss_of(config: RunConfig, features: TableFeatures) -> TableLoss | MaskedCells | CorruptedRows:
    """The loss of a configuration's model for a table.

    Raises:
        ConfigError: the table has no target, or keys of the configuration do not fit its task.
    """
    target, model = features.target, config.model
    if model.pretraining == "none" and target is None:
        raise ConfigError(
            "the table was prepared without a target",
            "prepare it with --target COLUMN, or give model.pretraining",
        )
    if model.pretraining != "none":
        for key in ("sampling", "class_weights"):
            if getattr(config.data, key) == "balanced":
                raise ConfigError(
                    f"data.{key} is balanced, but model.pretraining {model.pretraining} does not "
                    "learn the target",
                    f"leave data.{key} out",
                )
        if config.data.importance:
            raise ConfigError(
                f"data.importance is {config.data.importance}, but model.pretraining "
                f"{model.pretraining} does not learn the target",
                "leave data.importance out",
            )
        assert model.corrupted is not None  # the section gives it a value
        if model.pretraining == "masked_cells":
            return MaskedCells(features, model.corrupted)
        assert model.together is not None
        return CorruptedRows(features, model.corrupted, model.together)
    assert target is not None
    if config.data.sampling == "balanced":
        check_has_classes(target, "data.sampling")
    return TableLoss(
        target, class_weights=config.data.class_weights, quantiles=config.model.quantiles
    )


def sampled(section: DataSection, training: Any, target: TargetValues | None, group: Group) -> Any:
    """The training rows as `data.sampling` draws them. Collective.

    For balanced sampling the ranks read the classes of all rows, each its part of them.

    Args:
        section: the section data of the configuration.
        training: the training rows, a data set with `fetch` whose batches have the target third.
        target: what is predicted.
        group: all ranks of the job.

    Raises:
        DataError: rows cannot be read; on all ranks.
        ConfigError: the training rows are of one class; on all ranks.
    """
    if section.sampling == "natural" or target is None:
        return training
    with agreed(group):
        rows, classes = len(training), len(target.classes)
        first, end = (rows * rank // group.size for rank in (group.rank, group.rank + 1))
        mine = np.empty(end - first, class_dtype(classes))
        for begin in range(first, end, ROWS_AT_ONCE):
            some = np.arange(begin, min(begin + ROWS_AT_ONCE, end))
            mine[some - first] = training.fetch(some)[2].numpy()
    numbers = np.concatenate(group.gathered(mine, "the classes of the training rows"))
    with agreed(group):
        return BalancedClasses(training, numbers, classes)
