"""Files of predictions: a part for each portion of a table, put together in the table's order.

A part is an Arrow stream. Besides the columns of the result it has what the scores need. Rank 0
reads the parts one after the other, so it needs memory for one group of rows, and for the scores.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train import files
from hpc_train.data.prepare.foreign import import_pyarrow
from hpc_train.data.prepare.partial import Preparation, check_target, writing_to
from hpc_train.data.tables.conversion import exact_number
from hpc_train.data.tables.features import (
    FIRST_CODE,
    UNKNOWN,
    Categories,
    RawColumns,
    TargetValues,
)
from hpc_train.data.tables.schema import ColumnKind
from hpc_train.data.tables.stages import stage_entries
from hpc_train.data.tables.table_files import as_text
from hpc_train.data.tables.table_request import TableRequest
from hpc_train.data.tables.targets import encode_target, truth_as_classes
from hpc_train.errors import ConfigError, DataError, plural, some_of
from hpc_train.monitoring.scores import level_name
from hpc_train.mpi.group import Group
from hpc_train.training.table_losses import TableLoss, warn_of_not_finite

logger = logging.getLogger(__name__)

GROUP_ROWS = 1 << 16  # the least rows of a row group, but the last one
SHOWN_CLASSES = 5
PART_FORMAT = 3  # a higher one, after parts have changed, continues no older predictions
NUMBER_TYPES = ("int64", "float64", "string")  # of copied numbers: the first that has all digits
ROW = "row"
EXACT = 1 << 53  # float64 has each whole number below it
INT64 = 1 << 63
SCORES = "scores.json"  # of the partial folder
PREDICTION_SUFFIXES = (".parquet", ".csv")


@dataclass(frozen=True)
class PredictionSummary:
    """What was predicted.

    Args:
        rows: number of rows with predictions.
        wrong: number of wrong rows that were left out.
        unknown: number of cells with a category that the training rows had not.
        scores: the number of scored rows and the scores; None if the target is not in the table.
    """

    rows: int
    wrong: int
    unknown: int
    scores: Mapping[str, float] | None


@dataclass(frozen=True)
class PredictionColumns:
    """The columns of a file of predictions.

    Args:
        target: what is predicted.
        quantiles: the quantiles that a regression predicts; with none it predicts the mean.
        copies: columns of the table that are copied, with their kinds.
        scored: whether the table has the target, so that predictions are scored.
        weight: the table's column of weights for the scores; None: all rows weigh 1.
    """

    target: TargetValues
    quantiles: tuple[float, ...]
    copies: Mapping[str, ColumnKind] = field(default_factory=dict)
    scored: bool = False
    weight: str | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self._types()]
        if twice := [name for name in self.copies if names.count(name) > 1]:
            raise ConfigError(
                f"--columns names {twice[0]!r}, but the predictions have a column of this name",
                "leave it out, or rename it in the table",
            )

    @property
    def values(self) -> tuple[str, ...]:
        """The columns of what the model computes, in its order."""
        if self.target.task == "classification":
            return tuple(f"probability_{name}" for name in self.target.classes)
        if self.target.task == "multilabel":
            return tuple(f"probability_{name}" for name in self.target.names)
        return tuple(f"quantile_{level_name(level)}" for level in self.quantiles) or ("prediction",)

    @property
    def exact(self) -> tuple[str, ...]:
        """The copied columns of numbers. They are read as texts, too, so that no digit is lost."""
        return tuple(name for name, kind in self.copies.items() if kind == "numeric")

    def _types(self) -> list[tuple[str, str]]:
        of_kind = {"numeric": "numbers", "date": "timestamp", "categorical": "string"}
        types = [(ROW, "int64"), *((name, of_kind[kind]) for name, kind in self.copies.items())]
        if self.target.task == "classification":
            types.append(("prediction", "string"))
        if self.target.task == "multilabel":
            types += [(f"prediction_{name}", "int8") for name in self.target.names]
        return [*types, *((name, "float64") for name in self.values)]

    @property
    def hidden(self) -> int:
        """Number of columns of a part that the result has not: target, known, weight."""
        labels = len(self.target.names) if self.target.task == "multilabel" else 1
        return labels + 2 if self.scored else 0

    def schema(self, types: Mapping[str, str] | None = None) -> Any:
        """The Arrow schema of the result, or of a part, where numbers are copied in each type.

        Args:
            types: for each of `exact` its type in the result; None: the schema is a part's.
        """
        pa = import_pyarrow()
        kinds = {"timestamp": pa.timestamp("us", "UTC")}
        kinds["numbers"] = pa.struct([(of, getattr(pa, of)()) for of in NUMBER_TYPES])
        every = [(name, (types or {}).get(name, of)) for name, of in self._types()]
        named = [(name, kinds.get(of) or getattr(pa, of)()) for name, of in every]
        if types is None:
            named += [(f"score {number}", pa.float64()) for number in range(self.hidden)]
        return pa.schema(named)

    def narrow(self, fitting: Mapping[str, set[str]], batch: Any) -> None:
        """Remove the types that cannot hold all numbers of a part's batch.

        Args:
            fitting: for each of `exact` the types that are left.
            batch: the batch.
        """
        for name, types in fitting.items():
            copied = batch.column(name)
            missing = copied.field("string").null_count
            types -= {of for of in NUMBER_TYPES if copied.field(of).null_count > missing}

    def result(self, batch: Any, types: Mapping[str, str]) -> Any:
        """What the result has of a part's batch; `schema` says what `types` is."""
        pa = import_pyarrow()
        schema = self.schema(types)
        arrays = [
            array.field(types[name]) if name in types else array
            for name, array in zip(schema.names, batch.columns, strict=False)
        ]
        return pa.record_batch(arrays, schema=schema)

    def batch(self, numbers: np.ndarray, columns: RawColumns, predictions: np.ndarray) -> Any:
        """A batch of a part.

        Args:
            numbers: number of each row in its portion, int64 (N,).
            columns: the values of these rows.
            predictions: what `TableLoss.predictions` makes of the model's outputs, (N,) or (N,
                number of values).
        """
        pa = import_pyarrow()
        every = predictions.reshape(len(numbers), len(self.values))
        arrays = [pa.array(numbers)]
        arrays += [
            _exact(columns[as_text(name)], columns[name])
            if name in self.exact
            else _copied(columns[name])
            for name in self.copies
        ]
        if self.target.task == "classification":
            arrays.append(_texts(every.argmax(1), self.target.classes))
        if self.target.task == "multilabel":
            arrays += [pa.array(chance > 0.5).cast(pa.int8()) for chance in every.T]
        arrays += [pa.array(np.ascontiguousarray(value)) for value in every.T]
        if self.scored:
            target, known = encode_target(self.target, self._targets(columns))
            weight = np.ones(len(numbers)) if self.weight is None else columns[self.weight]
            known &= np.isfinite(weight)
            hidden = [*target.reshape(len(numbers), -1).T, known, weight]
            arrays += [pa.array(np.ascontiguousarray(one, np.float64)) for one in hidden]
        return pa.record_batch(arrays, schema=self.schema())

    def _targets(self, columns: RawColumns) -> RawColumns:
        if self.target.task != "classification":
            return columns
        [name] = self.target.names
        return {name: truth_as_classes(columns[name], self.target.classes)}

    def of_unknown_class(self, batch: Any) -> int:
        """How many rows of a part's batch have a class that the model does not know."""
        if self.target.task != "classification" or not self.scored:
            return 0
        target = batch.column(batch.num_columns - self.hidden).to_numpy()
        return int((target == UNKNOWN - FIRST_CODE).sum())

    def scored_rows(self, batch: Any) -> dict[str, np.ndarray]:
        """What `TableScores` needs of a part's batch: the rows with a known target."""
        every = [batch.column(name).to_numpy() for name in self.values]
        *targets, known, weight = (
            one.to_numpy() for one in batch.columns[batch.num_columns - self.hidden :]
        )
        kept = known > 0
        predictions, target = np.stack(every, 1)[kept], np.stack(targets, 1)[kept]
        if self.target.task == "regression" and not self.quantiles:
            predictions = predictions[:, 0]
        if self.target.task != "multilabel":
            target = target[:, 0]
        if self.target.task == "classification":
            target = target.astype(np.int64)
        return {"predictions": predictions, "target": target, "weight": weight[kept]}


def _exact(texts: Any, values: Any) -> Any:
    """A column of numbers as an Arrow array of structs, with a field for each of NUMBER_TYPES.

    All fields are null where a value is missing, and one is where its type has not all digits. Only
    whole numbers are taken from their texts: those of float32, such as 0.1, are shortened.

    Args:
        texts: the texts of N rows.
        values: the same values as numbers, float64 (N,).
    """
    pa = import_pyarrow()
    missing = np.isnan(values)
    used = {*texts.codes[~missing].tolist()}  # the others may be of rows that are left out
    numbers = [
        exact_number(text) if place in used else np.nan for place, text in enumerate(texts.values)
    ]
    whole = [int(n) if n == n and abs(n) < EXACT and n == int(n) else n for n in numbers]
    in_int64 = [n if isinstance(n, int) and -INT64 <= n < INT64 else None for n in whole]
    in_float64 = [isinstance(n, float) or int(float(n)) == n for n in whole]
    places = pa.array(texts.codes.astype(np.int32), mask=missing)
    fields = {
        "int64": pa.array(in_int64, pa.int64()).take(places),
        "float64": pa.array(values, mask=missing | ~np.array([*in_float64, False])[texts.codes]),
        "string": pa.array(texts.values, pa.string()).take(places),
    }
    return pa.StructArray.from_arrays([fields[of] for of in NUMBER_TYPES], names=NUMBER_TYPES)


def _copied(values: np.ndarray | Categories) -> Any:
    """A column of texts or dates as an Arrow array, null where a value is missing."""
    pa = import_pyarrow()
    if isinstance(values, Categories):
        return _texts(values.codes, values.values)
    missing = np.isnan(values)
    moments = np.round(np.where(missing, 0.0, values) * 1e6).astype(np.int64)
    return pa.array(moments, mask=missing).cast(pa.timestamp("us", "UTC"))


def _texts(codes: np.ndarray, texts: Sequence[str]) -> Any:
    """Texts by their places, (N,); null where a place is -1."""
    pa = import_pyarrow()
    places = pa.array(codes.astype(np.int32), mask=codes < 0)
    return pa.DictionaryArray.from_arrays(places, pa.array(texts, pa.string())).cast(pa.string())


def partial_of(target: Path) -> Path:
    """The partial folder of a result."""
    return target.with_name(f".{target.name}.partial")


def check_scores(scores: Path, folder: Path) -> None:
    """Make sure that the file of the scores is still to be made.

    Args:
        scores: the file.
        folder: what is made of the result so far. If that was killed when only the result was still
            to get its name, the file has the scores from there.

    Raises:
        DataError: there is something else at its place.
    """
    if not scores.exists():
        return
    with suppress(OSError):
        if (folder / SCORES).read_bytes() == scores.read_bytes():
            return
    raise DataError(f"{scores} exists already", "give another --scores, or delete it first")


def put_together(
    preparation: Preparation[TableRequest],
    columns: PredictionColumns,
    loss: TableLoss,
    scores: Path | None,
) -> PredictionSummary:
    """Make the result of all parts, and give it its name. Only rank 0 calls, after all others.

    Args:
        preparation: the stage whose portions are the parts.
        columns: the columns of the result.
        loss: makes the scores.
        scores: a file that the scores are written to.

    Raises:
        DataError: the result cannot be written, or somebody else has made it.
    """
    target = preparation.target
    with writing_to(target):
        _, entries = stage_entries(preparation.folder)
        result = preparation.folder / f"result{target.suffix}"
        types = {
            name: next(
                of for of in NUMBER_TYPES if all(of in one["fitting"][name] for one in entries)
            )
            for name in columns.exact
        }
        with (
            closing(_writer(result, columns.schema(types))) as writer,
            closing(loss.collector(Group())) as scored,
        ):
            waiting: list[Any] = []
            strange = 0  # rows of unknown classes
            for batch in _batches(preparation, entries):
                if columns.scored:
                    strange += columns.of_unknown_class(batch)
                    scored.add_rows(columns.scored_rows(batch))
                waiting.append(columns.result(batch, types))
                if sum(len(one) for one in waiting) >= GROUP_ROWS:
                    _write(writer, waiting)
            _write(writer, waiting)
            found = {"scored_rows": scored.rows, **scored.scores()} if columns.scored else None
        totals = {key: sum(one[key] for one in entries) for key in ("rows", "wrong", "unknown")}
        made = PredictionSummary(**totals, scores=found)
        files.sync(result)
        check_target(target)
        if scores is not None:
            told = json.dumps(made.scores, indent=2) + "\n"
            files.write_text(preparation.folder.parent / SCORES, told)
            with writing_to(scores):
                scores.parent.mkdir(parents=True, exist_ok=True)
                files.write_text(scores, told)
        files.rename(result, target)
        shutil.rmtree(partial_of(target), ignore_errors=True)
    warn_of_not_finite(sum(one["not_finite"] for one in entries))
    if strange:
        logger.warning(
            "%s not scored, because the model does not know the class: write classes as the table "
            "of its training has them, which are %s",
            plural(strange, "row is", "rows are"),
            some_of([*map(repr, columns.target.classes)], SHOWN_CLASSES),
        )
    return made


def _batches(preparation: Preparation[TableRequest], entries: Sequence[Any]) -> Iterator[Any]:
    """The batches of all parts, with the rows' numbers in the table."""
    pa = import_pyarrow()
    before = 0
    for entry in entries:
        with (
            pa.OSFile(str(preparation.shards / entry["file"])) as file,
            pa.ipc.open_stream(file) as part,
        ):
            for batch in part:
                numbers = pa.array(batch.column(0).to_numpy() + before)
                yield pa.record_batch([numbers, *batch.columns[1:]], schema=batch.schema)
        before += entry["rows"] + entry["wrong"]


def _writer(path: Path, schema: Any) -> Any:
    import_pyarrow()
    import pyarrow.csv
    import pyarrow.parquet

    if path.suffix == ".csv":
        return pyarrow.csv.CSVWriter(str(path), schema)
    return pyarrow.parquet.ParquetWriter(str(path), schema)


def _write(writer: Any, waiting: list[Any]) -> None:
    """Write batches as one row group, and forget them."""
    pa = import_pyarrow()
    if waiting:
        writer.write_table(pa.Table.from_batches(waiting).combine_chunks())
        waiting.clear()
