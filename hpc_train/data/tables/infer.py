"""Finds out what the columns of a table hold, from samples of its files.

The samples depend on the files only: the first records of each of some files, and some in the
middle of large ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from hpc_train.data.tables.array_source import sample_arrays
from hpc_train.data.tables.conversion import (
    TRUTH,
    ColumnValues,
    from_array,
    from_arrow,
)
from hpc_train.data.tables.csv_sample import sample_csv
from hpc_train.data.tables.csv_source import CSV_INDEX
from hpc_train.data.tables.features import Categories
from hpc_train.data.tables.parquet_source import sample_parquet, unnamed_index
from hpc_train.data.tables.schema import (
    MISSING,
    Column,
    ColumnKind,
    TableSchema,
    TableTask,
    columns_beside,
)
from hpc_train.data.tables.sources import table_columns
from hpc_train.data.tables.table_files import TableFile, check_names, told_names
from hpc_train.errors import DataError, some_of

logger = logging.getLogger(__name__)

SAMPLED_TABLES = 32
MOST_CLASSES = 20  # different whole numbers of a target that is taken for classes
FEW_TEXTS = 20  # different texts that are categories in any case
TEXT_SHARE = 0.5  # of the values; if more texts are different, they are free text or names of rows
TOLD_COLUMNS = 10  # in the log, for each thing that is told of columns
MOST_WRONG = 0.05  # of the values; if more are no numbers, the column is not numeric
_Stored = Literal["text", "number", "truth", "date", "other"]


@dataclass
class _Sampled:
    """What samples have of a column: how it is stored, and how often it has each text.

    `lost` has the texts that stand for a missing value, but the empty one. `unread` says why its
    values are not read; it is "" if they are.
    """

    stored: set[_Stored] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)
    unread: str = ""

    def count(self, convert: Callable[..., ColumnValues], array: Any) -> None:
        """Count the texts of an array, or note why it is not read."""
        try:
            raw = convert(array, "categorical", ()).raw
        except DataError as error:
            self.unread = error.cause.removesuffix(", not categorical")
            return
        assert isinstance(raw, Categories)
        self.counts.update(text for text in raw.texts().tolist() if text is not None)

    def lose(self, missing: Sequence[str]) -> None:
        """Take the texts that stand for a missing value from the counted ones."""
        for text in [text for text in self.counts if text.strip() in missing]:
            del self.counts[text]
            self.lost |= {text.strip()} - {""}

    def share(self, check: Callable[[str], bool]) -> float:
        """The share of the values that pass a check."""
        total = self.counts.total()
        return sum(n for text, n in self.counts.items() if check(text)) / total if total else 0.0


def usual_missing(files: Sequence[TableFile]) -> tuple[str, ...]:
    """The texts that stand for a missing value in files for which nobody has said it.

    In Parquet a missing value is null, so only the empty text is one of them.
    """
    return ("",) if all(file.format == "parquet" for file in files) else MISSING


def infer_schema(
    files: Sequence[TableFile],
    *,
    targets: Sequence[str] = (),
    task: TableTask | None = None,
    group: str | None = None,
    time: str | None = None,
    weight: str | None = None,
) -> TableSchema:
    """Make the schema of a table. One rank calls it.

    Columns of numbers and truth values become numeric, those of ISO 8601 dates become dates, and
    other texts become categorical. A column whose texts are nearly all different, or without any
    value, is ignored, and the log says so. The columns for the group and the classes are
    categorical, so that their values stay exact texts.

    Args:
        files: the table's files. All must have the same columns.
        targets: the columns that are predicted.
        task: what is predicted; None: "none" without a target, "multilabel" with several ones,
            "regression" if the target is numeric and not one of a few whole numbers or a truth
            value, else "classification".
        group: a column whose equal values stay in one split.
        time: a column of numbers or dates by which the table is split.
        weight: a column of numbers that are the weights of rows.

    Raises:
        DataError: a file cannot be read or has other columns, or a column does not suit its role.
        SetupError: a library is missing.
        UserError: a file is HDF5, MPI runs, and `start_workers` was not called before.
    """
    names = table_columns(files[0])
    for file in files[1:]:
        check_names(file, table_columns(file), names)
    sampled = {name: _Sampled() for name in names}
    some = files[:: -(-len(files) // SAMPLED_TABLES)]
    for file in some:
        _sample(file, sampled, len(some))
    missing, roles = usual_missing(files), {*targets, group, time, weight}
    for column in sampled.values():
        column.lose(missing)
    kinds = {name: _kind(column, used=name in roles) for name, column in sampled.items()}
    for name in targets:
        if name not in names:
            raise DataError(f"the table has no column {name!r}", told_names(files[0], name, names))
    if task is None:
        task = _task(kinds, sampled, targets)
    _suit_roles(kinds, names, {"group": group, "time": time, "weight": weight})
    _suit_targets(kinds, targets, task)
    _tell_kinds(kinds, sampled, roles)
    _tell_lost({n: sampled[n].lost for n, kind in kinds.items() if kind == "categorical"}, roles)
    return TableSchema(
        columns=tuple(Column(name=name, kind=kind) for name, kind in kinds.items()),
        task=task,
        targets=tuple(targets),
        group=group,
        time=time,
        weight=weight,
        missing=missing,
    )


def _sample(file: TableFile, sampled: dict[str, _Sampled], files: int) -> None:
    """Add the samples of a file, one of several, to those of its columns."""
    if file.format == "csv":
        _sample_csv(file, sampled, files)
    elif file.format == "parquet":
        names, batches = sample_parquet(file)
        for batch in batches:
            for name, array in zip(names, batch.columns, strict=True):
                if array.null_count < len(array):
                    sampled[name].stored.add(_stored_arrow(array.type))
                sampled[name].count(from_arrow, array)
        for name in unnamed_index(file):
            sampled[name].unread = "is the index of a pandas table, which has no name there"
    else:
        kinds: dict[str, _Stored] = {"b": "truth", "M": "date", "S": "text", "U": "text"}
        for name, array in sample_arrays(file).items():
            sampled[name].stored.add(kinds.get(array.dtype.kind, "number"))
            sampled[name].count(from_array, array)


def _sample_csv(file: TableFile, sampled: dict[str, _Sampled], files: int) -> None:
    names, blocks = sample_csv(file, files)
    for block in blocks:
        for name, column in zip(names, zip(*block, strict=True), strict=False):
            sampled[name].stored.add("text")
            sampled[name].counts.update(column)
    if names[0] == CSV_INDEX:
        sampled[CSV_INDEX].unread = "has no name, so it is taken for the index of a pandas table"


def _stored_arrow(of: Any) -> _Stored:
    import pyarrow as pa

    of = of.value_type if pa.types.is_dictionary(of) else of
    if pa.types.is_boolean(of):
        return "truth"
    if pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_decimal(of):
        return "number"
    if pa.types.is_timestamp(of) or pa.types.is_date(of):
        return "date"
    return "other" if pa.types.is_nested(of) else "text"


def _kind(column: _Sampled, *, used: bool) -> ColumnKind:
    if not column.counts or (column.unread and not used):
        return "ignored"
    if column.stored <= {"number", "truth"}:
        return "numeric"
    if column.stored == {"date"}:
        return "date"
    if column.share(_is_number) >= 1 - MOST_WRONG:
        return "numeric"
    if column.share(_is_date) >= 1 - MOST_WRONG:
        return "date"
    most = max(FEW_TEXTS, TEXT_SHARE * column.counts.total())
    return "categorical" if len(column.counts) <= most else "ignored"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.strip().lower() in TRUTH
    return True


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text.strip())
    except ValueError:
        return False
    return True


def _task(
    kinds: dict[str, ColumnKind], sampled: dict[str, _Sampled], targets: Sequence[str]
) -> TableTask:
    if len(targets) != 1:
        return "multilabel" if targets else "none"
    column = sampled[targets[0]]
    if kinds[targets[0]] in ("categorical", "ignored"):
        return "classification"
    if column.counts and all(text.strip().lower() in TRUTH for text in column.counts):
        return "classification"
    whole = len(column.counts) <= MOST_CLASSES and all(_is_whole(text) for text in column.counts)
    if whole and len(column.counts) > len(TRUTH):
        logger.info(
            "%s has %d different whole numbers: they are taken as classes; if they are counts or "
            "amounts, give --task regression",
            targets[0],
            len(column.counts),
        )
    return "classification" if whole else "regression"


def _is_whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except ValueError:
        return False


def _suit_roles(
    kinds: dict[str, ColumnKind], names: Sequence[str], roles: dict[str, str | None]
) -> None:
    for role, name in roles.items():
        if name is None:
            continue
        if name not in names:
            raise DataError(f"the table has no column {name!r}", columns_beside(name, names))
        if role == "group":
            kinds[name] = "categorical"
        elif kinds[name] not in (("numeric", "date") if role == "time" else ("numeric",)):
            what = "numbers or dates" if role == "time" else "numbers"
            raise DataError(f"column {name!r}, the {role}, has no {what}", "name another column")


def _suit_targets(kinds: dict[str, ColumnKind], targets: Sequence[str], task: TableTask) -> None:
    for name in targets:
        if task == "regression" and kinds[name] != "numeric":
            raise DataError(
                f"column {name!r}, the target of a regression, has no numbers",
                "name another column, or give --task classification",
            )
        if task == "classification" or kinds[name] != "numeric":
            kinds[name] = "categorical"


def _tell_kinds(
    kinds: Mapping[str, ColumnKind], sampled: Mapping[str, _Sampled], roles: Collection[str | None]
) -> None:
    """Log what a person may want to change in the schema."""
    told: Counter[str] = Counter()
    for name, kind in kinds.items():
        if said := _told(name, kind, sampled[name], used=name in roles):
            told[said[0]] += 1
            if told[said[0]] <= TOLD_COLUMNS:
                logger.info(*said)
    if (more := sum(max(0, count - TOLD_COLUMNS) for count in told.values())) > 0:
        logger.info("the same is true of %d more columns; --write_schema writes all kinds", more)


def _told(name: str, kind: ColumnKind, column: _Sampled, *, used: bool) -> tuple[Any, ...]:
    """What the log says of a column; () if there is nothing to say."""
    total, different = column.counts.total(), len(column.counts)
    odd = [text for text in column.counts if not _is_number(text)]
    if kind == "ignored" and (column.unread or not total):
        why = column.unread or "has no value in the samples"
        return "column %r is ignored: it %s", name, why
    if kind in ("categorical", "ignored") and len(odd) == 1 < different - 1 and not used:
        said = (
            "column %r is %s, because %.40r is no number, as all its other values are; if it "
            "stands for a missing value, add it to `missing` in the schema"
        )
        return said, name, kind, odd[0]
    if kind == "ignored":
        said = (
            "column %r is ignored: %d of its %d sampled values are different texts, so they may be "
            "free text or names of rows; give it the kind categorical in the schema to use it"
        )
        return said, name, different, total
    if kind in ("numeric", "date") and column.stored == {"text"} and not used:
        check = _is_number if kind == "numeric" else _is_date
        if wrong := [text for text in column.counts if not check(text)]:
            return "column %r is %s, but some values are not, as %.40r", name, kind, wrong[0]
    return ()


def _tell_lost(lost: Mapping[str, set[str]], roles: Collection[str | None]) -> None:
    """Warn of texts in columns of categories that count as missing, as they may be categories."""
    columns: dict[str, list[str]] = {}
    for name in sorted(lost, key=lambda name: name not in roles):
        for text in sorted(lost[name]):
            columns.setdefault(text, []).append(f"column {name!r}")
    for text, names in columns.items():
        logger.warning(
            "%s %s the text %r, which counts as a missing value; if it is a value, take it out of "
            "`missing` in the schema, which --write_schema writes",
            some_of(names),
            "has" if len(names) == 1 else "have",
            text,
        )
