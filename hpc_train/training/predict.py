"""`hpc-train predict`: what a trained model of tables predicts for the rows of a table.

The table's files are cut into portions, as `hpc-train prepare table` cuts them, which any rank may
take. Batches of rows are cut inside of a portion, and each is computed by one thread, so no bit of
a prediction depends on the number of ranks or threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train import files
from hpc_train.data.prepare.dealing import Dealing
from hpc_train.data.prepare.foreign import import_pyarrow
from hpc_train.data.prepare.partial import ShardPortion, key_of_tree
from hpc_train.data.tables.features import UNKNOWN, TableFeatures
from hpc_train.data.tables.schema import Column, ColumnKind, TableSchema, parse_schema
from hpc_train.data.tables.sources import list_tables, read_rows, table_columns
from hpc_train.data.tables.stage_rows import right_rows
from hpc_train.data.tables.stages import finish_portion, portion_of_row
from hpc_train.data.tables.table_files import RawRows, TablePortion, WrongPolicy, told_names
from hpc_train.data.tables.table_request import TableOptions, TableRequest, table_request
from hpc_train.errors import ConfigError, DataError, some_of
from hpc_train.training.predicted_rows import (
    NUMBER_TYPES,
    PART_FORMAT,
    PREDICTION_SUFFIXES,
    PredictionColumns,
    check_scores,
    partial_of,
)
from hpc_train.training.table_losses import TableLoss, rows_not_finite
from hpc_train.training.trained import TrainedModel


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """What a user wants to be predicted.

    Args:
        paths: files of the table, or folders.
        out: the file to write, .parquet or .csv.
        columns: columns of the table that are copied.
        batch: number of rows that the model computes at once.
        wrong: what to do about a wrong row: raise an error, or leave it out and count it.
        quoted_newlines: whether a quoted field of a csv file may have line ends in it.
        score: whether predictions are scored, if the table has the target.
        scores: a file to write the scores to.
    """

    paths: Sequence[str]
    out: Path
    columns: tuple[str, ...] = ()
    batch: int = 256
    wrong: WrongPolicy = "raise"
    quoted_newlines: bool = True
    score: bool = True
    scores: Path | None = None

    def check(self) -> None:
        """Check what can be checked without the table.

        Raises:
            ConfigError: a value is not allowed, or two of them exclude each other.
            DataError: there is a folder at the place of the result.
        """
        if self.out.suffix not in PREDICTION_SUFFIXES:
            raise ConfigError(
                f"--out is {self.out}", f"give a file with {' or '.join(PREDICTION_SUFFIXES)}"
            )
        if self.out.is_dir():
            raise DataError(f"--out {self.out} is a folder", "give the name of a file")
        if self.scores is None:
            return
        if not self.score:
            raise ConfigError("--scores and --no_scores are both given", "give one of them")
        if self.scores.resolve() == self.out.resolve():
            raise ConfigError(f"--out and --scores are both {self.out}", "give two files")


@dataclass(frozen=True)
class PredictionPlan:
    """How a table is read, and what is written.

    Args:
        request: the files, the schema by which they are read, and the file to make.
        columns: the columns of the file to make.
        key: a hash of all that the file depends on.
    """

    request: TableRequest
    columns: PredictionColumns
    key: str


def plan_predictions(trained: TrainedModel, options: PredictOptions) -> PredictionPlan:
    """Look at the files of a table, and plan the predictions. One rank calls it.

    The kinds of the columns that the model reads are those of the table on which it was trained.
    Other columns are ignored, or copied as texts.

    Raises:
        ConfigError: options do not fit the table or each other.
        DataError: a path is no table, a column is missing, or there is something at the place of
            the result or of the scores.
        SetupError: a library is missing.
    """
    options.check()
    features, loss = features_read_by(trained), loss_of_checkpoint(trained)
    first = list_tables(options.paths)[0]
    found = table_columns(first)
    for names, why in ((features.columns, "which the model reads"), (options.columns, "to copy")):
        if missing := [name for name in names if name not in found]:
            what = "column" if len(missing) == 1 else "columns"
            raise DataError(
                f"{first.path} has no {what} {some_of([*map(repr, missing)], 5)}, {why}",
                told_names(first, missing[0], found),
            )
    schema = _schema(trained, features, found, options)
    if options.scores is not None and schema.task == "none":
        raise DataError(
            f"{first.path} has no scores to write, as it has no column "
            f"{', '.join(map(repr, loss.target.names))} with the target",
            "leave --scores out",
        )
    columns = PredictionColumns(
        loss.target,
        loss.quantiles,
        {name: schema.kind(name) for name in options.columns},
        scored=schema.task != "none",
        weight=schema.weight,
    )
    given = TableOptions(wrong=options.wrong, quoted_newlines=options.quoted_newlines)
    request = table_request(options.paths, options.out, schema, given)
    tree = [
        PART_FORMAT,
        request.key,
        options.batch,
        options.columns,
        trained.about,
        trained.hashes.hex(),
    ]
    plan = PredictionPlan(request, columns, key_of_tree(tree))
    if options.scores is not None:
        check_scores(options.scores, partial_of(request.target) / plan.key)
    return plan


def features_read_by(trained: TrainedModel) -> TableFeatures:
    """The features that a model reads."""
    return TableFeatures.from_tree(trained.about["features"])


def loss_of_checkpoint(trained: TrainedModel) -> TableLoss:
    """What turns a model's outputs to predictions, and predictions to scores."""
    target = features_read_by(trained).target
    assert target is not None  # else it could only be pretrained
    return TableLoss(target, quantiles=trained.about.get("quantiles") or ())


def _schema(
    trained: TrainedModel, features: TableFeatures, found: list[str], options: PredictOptions
) -> TableSchema:
    """How a table with these columns is read."""
    kinds: dict[str, ColumnKind] = dict.fromkeys(found, "ignored")
    kinds |= dict.fromkeys(options.columns, "categorical")
    kinds |= {one.column: "numeric" if one.part is None else "date" for one in features.numeric}
    kinds |= {one.name: "categorical" for one in features.categorical}
    roles: dict[str, Any] = {"task": "none", "targets": ()}
    if options.score and "schema" in trained.about:
        known = parse_schema(trained.about["schema"])
        if set(known.targets) <= set(found):
            weight = known.weight if known.weight in found else None
            roles = {"task": known.task, "targets": known.targets, "weight": weight}
            used = [*known.targets, *([] if weight is None else [weight])]
            kinds |= {name: known.kind(name) for name in used}
    every = tuple(Column(name=name, kind=kind) for name, kind in kinds.items())
    return TableSchema(columns=every, missing=features.missing, **roles)


class TablePredictor:
    """Predicts rows of a table, with the whole model on this rank.

    Args:
        trained: the model.
        plan: how the table is read, and what is written.
        batch: number of rows that the model computes at once.
        threads: compute the batches.
    """

    def __init__(
        self, trained: TrainedModel, plan: PredictionPlan, batch: int, threads: Executor
    ) -> None:
        self.features, self.loss = features_read_by(trained), loss_of_checkpoint(trained)
        self.module, self.columns = trained.module, plan.columns
        self.batch, self.threads = batch, threads
        self._like = next(trained.module.parameters())  # the type of numbers, and the device

    def make_part(self, dealing: Dealing[TableRequest], portion: ShardPortion) -> None:
        """Predict the rows of a portion, and write them to a file."""
        pa = import_pyarrow()
        request = dealing.preparation.recipe
        source = portion_of_row(dealing.preparation.content(portion))
        name = f"{portion.name}.arrow"
        path = dealing.scratch / name
        rows = wrong = unknown = not_finite = 0
        schema = self.columns.schema()
        fitting = {name: {*NUMBER_TYPES} for name in self.columns.exact}
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as part:
            for batch in _read(source, request, self.columns.exact):
                numbers, columns = right_rows(batch, request)
                wrong += batch.wrong + len(batch.numbers) - len(numbers)
                rows += len(numbers)
                if len(numbers):
                    numeric, categorical = self.features.encode(columns)
                    unknown += int((categorical == UNKNOWN).sum())
                    predictions = self.predict(numeric, categorical)
                    not_finite += rows_not_finite(predictions)
                    made = self.columns.batch(numbers, columns, predictions)
                    self.columns.narrow(fitting, made)
                    part.write_batch(made)
                dealing.tell(0)
        files.sync(path)
        tree = {"file": name, "nbytes": path.stat().st_size}
        tree |= {"rows": rows, "wrong": wrong, "unknown": unknown}
        tree |= {"not_finite": not_finite}
        tree |= {"fitting": {name: sorted(types) for name, types in fitting.items()}}
        finish_portion(dealing, portion, name, tree)

    def predict(self, numeric: np.ndarray, categorical: np.ndarray) -> np.ndarray:
        """The predictions for N rows, as `TableLoss.predictions` returns them.

        Args:
            numeric: float64 (N, number of numeric features), N at least 1.
            categorical: int32 (N, number of categorical features).

        Raises:
            ConfigError: a batch does not fit in the GPU's memory.
        """
        largest = np.finfo(np.float32).max
        rounded = np.clip(numeric, -largest, largest).astype(np.float32)  # as shards have them
        batches = (
            (rounded[begin : begin + self.batch], categorical[begin : begin + self.batch])
            for begin in range(0, len(numeric), self.batch)
        )
        try:
            return np.concatenate([*self.threads.map(self._forward, batches)])
        except torch.OutOfMemoryError as error:
            first = str(error).partition(". ")[0]
            raise ConfigError(
                f"the GPU has too little memory for --batch {self.batch} ({first})",
                "give a smaller --batch",
            ) from None

    def _forward(self, batch: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        # The copies lie where torch allocates. A product's last bits may depend on alignment.
        numeric, categorical = map(torch.from_numpy, batch)
        with torch.inference_mode():
            outputs: Tensor = self.module(
                numeric.to(self._like, copy=True),
                categorical.to(self._like.device, torch.int64, copy=True),
            )
            found: np.ndarray = self.loss.predictions(outputs).cpu().numpy()
        return found


def _read(source: TablePortion, request: TableRequest, texts: Collection[str]) -> Iterator[RawRows]:
    """`read_rows`, whose errors tell no remedy that only a preparation has."""
    try:
        yield from read_rows(source, request.schema, request.options.wrong, texts)
    except DataError as error:
        if "schema" not in error.remedy:
            raise
        others = ", or leave such rows out by --wrong_rows count" * ("--wrong" in error.remedy)
        remedy = f"give values of the kind that the column had in training{others}"
        raise DataError(error.cause, remedy) from None


@contextmanager
def single_threads(count: int) -> Iterator[Executor]:
    """Some threads. In each of them torch computes with one thread.

    The order of additions, and so the last bits, then do not depend on the number of cores.
    """
    with ThreadPoolExecutor(count, "predict", partial(torch.set_num_threads, 1)) as threads:
        yield threads
