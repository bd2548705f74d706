"""Trains a model of a table in memory on the ranks of a job."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from hpc_train import log
from hpc_train.checkpoint import restore
from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.checkpoint.weights import start_from
from hpc_train.config import RunConfig
from hpc_train.data.tables.arrays_table import TableArrays
from hpc_train.data.tables.features import RawColumns, TableFeatures
from hpc_train.errors import (
    CheckpointError,
    CheckpointMismatch,
    NotFiniteError,
    UserError,
    plural,
)
from hpc_train.models.shape import Shape
from hpc_train.mpi.agreement import agreed, from_first, same
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.planning.model import division_of, shape_of, table_sizes
from hpc_train.tabular.fitted import FittedTable
from hpc_train.tabular.session import checking
from hpc_train.tabular.settings import KIND_OF_MODEL, OWN, FitSettings
from hpc_train.training.in_memory import InMemoryTrainer
from hpc_train.training.table_losses import TableLoss
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

logger = logging.getLogger(__name__)

THE_TABLE = "the table"  # part of the identity of a checkpoint
MODELS = {kind: model for model, kind in KIND_OF_MODEL.items()}
CHOICES = "choices"  # a key of a checkpoint's `about`
DECIDING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("run", ("seed",)),
    ("model", ()),
    ("optimizer", ()),
    ("precision", ("dtype",)),
    ("gradients", ("average_every", "reduction", "compression")),
    ("run", ("steps", "patience")),
    ("data", ("batch", "shuffle", "validation_every", "validation_batches")),
)
"""The sections of the configuration that decide what a fit makes, with their keys; () is all."""
PASSES = 3  # operations of a step, as a multiple of those of its forward pass
WORTH_A_THREAD = 7.5e8
"""Operations of a step for which one more thread saves time: benchmarks/table_threads.py."""


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Some rows of a table.

    Args:
        columns: the columns that the features are made of, N rows.
        target: int64 (N,) numbers of classes, float64 (N,) scaled values, or float64 (N, labels) of
            0 and 1.
        weight: float64 (N,).
    """

    columns: RawColumns
    target: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a training has made, the same on all ranks.

    Args:
        model: the trained model.
        history: of each step that was recorded, its number and loss, and after a validation the
            loss and the scores of the rows that are held out.
    """

    model: FittedTable
    history: list[dict[str, float]]


def fit_table(
    settings: FitSettings,
    features: TableFeatures,
    training: TableRows,
    held_out: TableRows | None,
    class_factors: np.ndarray | None,
    runtime: Runtime,
) -> FitResult:
    """Train a model. Collective; all ranks pass the same.

    Args:
        settings: the parameters of the estimator.
        features: the features of the training rows.
        training: the rows to train on.
        held_out: the rows to validate with; None: there are none.
        class_factors: what the loss of a row is multiplied by for its class, besides its weight,
            float64 (C,); None: there are no factors. Scores do not count them.
        runtime: the runtime of the job.

    Raises:
        ConfigError: a parameter has no possible value, or does not fit the ranks.
        UserError: ranks have different data.
        Stopped: a signal or the time limit stopped the training, with a checkpoint.
        HpcTrainError: a part of the job failed; the same error is raised on all ranks.
    """
    group = runtime.world
    assert features.target is not None
    parameters = settings.to_text()
    same(group, "the configuration of the estimator", parameters, "give all ranks the same one")
    with checking(group):
        config = settings.configuration(len(training), held_out=held_out is not None)
        of_replica = config.parallel.tp * config.parallel.pp
        if len(training) < group.size // of_replica:
            raise UserError(
                f"fit has {plural(len(training), 'row')} to train on, fewer than the job has "
                f"replicas of the model ({group.size // of_replica})",
                f"start at most {plural(len(training) * of_replica, 'rank')}",
            )
        shape = shape_of(config.model, table_sizes(features, config.model))
        shape.check(division_of(config.parallel))
        dtype = getattr(torch, config.precision.parameters)
        data = _arrays(features, training, dtype)
        validation = None if held_out is None else _arrays(features, held_out, dtype)
        digest = _digest(features, data, validation, class_factors)
    same(group, "the table that fit was given", digest, "give all ranks the same table")
    loss = TableLoss(features.target, quantiles=config.model.quantiles)
    loss.factors = None if class_factors is None else torch.from_numpy(class_factors)
    task = TrainingTask(
        shape.build,
        data,
        loss,
        validation,
        scores=loss,
        identity={
            THE_TABLE: digest,
            "model.kind": config.model.kind,
            "model.quantiles": config.model.quantiles,
            **shape.identity,
        },
        about={
            "kind": config.model.kind,
            "shape": asdict(shape),
            "dtype": config.precision.parameters,
            "quantiles": config.model.quantiles,
            "features": features.to_tree(),
            CHOICES: _choices(config, digest),
        },
        private_parameters=True,
        shape=shape,
    )
    with _shown(group, verbose=settings.verbose):
        if settings.run_dir is None:
            weights, history = _in_memory(config, task, runtime, shape, settings.verbose)
        else:
            weights, history = _with_files(config, task, runtime, shape, settings.verbose)
    found = {name: one.numpy() for name, one in weights.items()}
    loss.factors = None  # predictions need none
    model = FittedTable(shape, found, features, loss)
    return FitResult(model=model, history=[_shown_of(one) for one in history])


def _shown_of(record: dict[str, float]) -> dict[str, float]:
    """What the history has of a record."""
    return {
        key: one
        for key, one in record.items()
        if key in ("step", "loss") or key.startswith("validation_")
    }


def _arrays(features: TableFeatures, rows: TableRows, dtype: torch.dtype) -> TableArrays:
    numeric, categorical = features.encode(rows.columns)
    target = torch.from_numpy(rows.target)
    return TableArrays(
        torch.from_numpy(numeric).to(dtype),
        torch.from_numpy(categorical.astype(np.int64)),
        target.to(dtype) if target.is_floating_point() else target,
        torch.from_numpy(rows.weight).to(dtype),
    )


def _digest(
    features: TableFeatures,
    training: TableArrays,
    held_out: TableArrays | None,
    class_factors: np.ndarray | None,
) -> str:
    """A hash of features, rows and class factors."""
    found = xxhash.xxh3_128(json.dumps(features.to_tree()).encode())
    found.update(b"" if class_factors is None else class_factors.tobytes())
    for table in (training, held_out):
        for tensor in () if table is None else table.tensors:
            found.update(str(tuple(tensor.shape)).encode())
            found.update(tensor.contiguous().numpy().tobytes())
    digest: str = found.hexdigest()
    return digest


Trained = tuple[dict[str, Tensor], list[dict[str, float]]]


def _limit_threads(trainer: Trainer, shape: Shape) -> None:
    """Let torch use no more threads than a step has work for: waking them takes time as well."""
    flops = PASSES * sum(part.flops for part in shape.parts()) * trainer.config.data.batch
    wanted = 1 + int(flops / trainer.group.size / WORTH_A_THREAD)
    torch.set_num_threads(min(torch.get_num_threads(), wanted))


def _in_memory(
    config: RunConfig, task: TrainingTask, runtime: Runtime, shape: Shape, shown: bool
) -> Trained:
    with InMemoryTrainer(config, task, runtime) as trainer:
        trainer.shown = shown
        _limit_threads(trainer, shape)
        with _remedied(""):
            trainer.train()
        return trainer.weights, trainer.records


def _with_files(
    config: RunConfig, task: TrainingTask, runtime: Runtime, shape: Shape, shown: bool
) -> Trained:
    """Train in a run directory, and read the best checkpoint. Collective."""
    from_first(runtime.world, lambda: _check_same_fit(config, task))
    with Trainer(config, task, runtime) as trainer:
        trainer.shown = shown
        _limit_threads(trainer, shape)
        with _remedied(", and give another run_dir"):
            trainer.train()
    directory = Path(config.run.dir)
    path, history = from_first(
        runtime.world, lambda: (_best(directory), _records(directory / "metrics.jsonl"))
    )
    with agreed(runtime.world), torch.random.fork_rng(devices=[]):
        module = shape.build().to(getattr(torch, config.precision.parameters))
    start_from(path, module, {}, runtime.world)
    return {name: one.detach() for name, one in module.state_dict().items()}, history


@contextmanager
def _remedied(also: str) -> Iterator[None]:
    """Tell the remedy of a training that diverges in the words of an estimator's user.

    No such training is resumed: there are no checkpoints, or they are of another learning rate.
    """
    try:
        yield
    except NotFiniteError as error:
        error.remedy = f"set a smaller lr, or optimizer.clip_norm in config{also}"
        raise


def _check_same_fit(config: RunConfig, task: TrainingTask) -> None:
    """Check that the checkpoints of a run directory are of this fit. One rank calls it.

    Resuming checks it as well, in the words of a configuration.

    Raises:
        CheckpointMismatch: they are of another one.
    """
    saved = _newest_state(Path(config.run.dir))
    if saved is None:
        return
    made = saved["about"].get(CHOICES, {})
    for name, value in json.loads(json.dumps((task.about or {})[CHOICES])).items():
        if name in made and made[name] == value:
            continue
        if name == THE_TABLE:
            raise CheckpointMismatch(
                f"run_dir {config.run.dir} has a fit to another table",
                "give the same X, y, sample_weight, eval_set, class_weight and "
                "validation_fraction, or another run_dir",
            )
        raise CheckpointMismatch(
            f"run_dir {config.run.dir} has a fit with {name} {made.get(name)}, this one has "
            f"{value}",
            f"set {name} back, or give another run_dir",
        )


def _newest_state(directory: Path) -> dict[str, Any] | None:
    """What the newest sound checkpoint has beside tensors; None if there is none."""
    for path in find_checkpoints(directory / "checkpoints", "auto"):
        with suppress(CheckpointError, CheckpointMismatch):  # resuming skips it, or names it
            return restore.Tensors(path).state()
    return None


def _choices(config: RunConfig, digest: str) -> dict[str, Any]:
    """What decides a fit to a table with this hash, by the words of its user."""
    tree, chosen = asdict(config), {}
    for section, keys in DECIDING:
        for key in keys or tree[section]:
            name, value = f"{section}.{key}", tree[section][key]
            chosen[OWN.get(name, name).partition(" ")[0] or name] = MODELS.get(str(value), value)
        if section == "gradients":
            chosen[THE_TABLE] = digest  # it may decide the defaults of those after it
    return chosen


def _best(directory: Path) -> Path:
    """The checkpoint with the lowest validation loss, or the newest one if none has any."""

    def rank(path: Path) -> tuple[float, int]:
        score = restore.Tensors(path).state().get("score", float("inf"))
        return score, -step_of(path)

    return min(find_checkpoints(directory / "checkpoints", "auto"), key=rank)


def _records(path: Path) -> list[dict[str, float]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}, which has the history of the fit, cannot be read ({error})",
            "give another run_dir, or remove this one to fit anew",
        ) from None


@contextmanager
def _shown(group: Group, *, verbose: bool) -> Iterator[None]:
    """Show messages on the console meanwhile, if that is wanted."""
    if not verbose:
        yield
        return
    handler = log.to_console(group.rank)
    try:
        yield
    finally:
        log.stop(handler)
