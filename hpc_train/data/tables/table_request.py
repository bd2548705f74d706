"""What a user wants to be made of a table, with the files that were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hpc_train.data.prepare.partial import check_outside, check_sizes, key_of_tree
from hpc_train.data.tables.features import RawColumns
from hpc_train.data.tables.fixed import FeatureOptions
from hpc_train.data.tables.schema import TableSchema
from hpc_train.data.tables.sources import list_tables
from hpc_train.data.tables.table_files import PORTION_BYTES, TableFile, WrongPolicy
from hpc_train.errors import DataError

TABLE_PLAN = 4  # a higher one, after the plan or the rows have changed, continues no older plan


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How a table is prepared.

    Args:
        validation: share of the rows that is held out: of all rows, of the groups, or of the rows
            with the latest times.
        shard_mb: largest size of a shard in MiB. Each rank has one in memory.
        wrong: what to do about a row with a value that its column's kind does not allow: raise an
            error, or leave it out and count it.
        quoted_newlines: whether a quoted field of a csv file may have line ends in it.
        features: how features are made.
    """

    validation: float = 0.1
    shard_mb: float = 64.0
    wrong: WrongPolicy = "raise"
    quoted_newlines: bool = True
    features: FeatureOptions = field(default_factory=FeatureOptions)


@dataclass(frozen=True)
class TableRequest:
    """What a user wants to be made of a table.

    Args:
        target: the data folder to make.
        schema: the table's schema.
        files: the files of the table.
        options: how it is prepared.
    """

    target: Path
    schema: TableSchema
    files: tuple[TableFile, ...]
    options: TableOptions

    @property
    def key(self) -> str:
        """A hash of everything that the result depends on."""
        tree = [
            TABLE_PLAN,
            PORTION_BYTES,
            self.schema.to_tree(),
            asdict(self.options),
            [asdict(file) for file in self.files],
        ]
        return key_of_tree(tree)


def table_request(
    paths: Sequence[str | Path],
    out: str | Path,
    schema: TableSchema,
    options: TableOptions | None = None,
) -> TableRequest:
    """List the files of a table, and describe what to make of them.

    Args:
        paths: files, or folders that are searched with their subfolders.
        out: the data folder to make.
        schema: the table's schema.
        options: how it is prepared; by default as `TableOptions` says.

    Raises:
        DataError: a path does not exist, `out` exists already or is inside of a path, a value is
            not allowed, or a column has a kind that its role does not allow.
    """
    given = options or TableOptions()
    check_outside(out, paths, "read")
    check_sizes(given.shard_mb, given.validation)
    for name, least in (("max_categories", 1), ("bins", 1)):
        if getattr(given.features, name) < least:
            value = getattr(given.features, name)
            raise DataError(f"--{name} is {value}", f"give a number of at least {least}")
    _check_roles(schema)
    return TableRequest(Path(out), schema, tuple(list_tables(paths, tell=True)), given)


def _check_roles(schema: TableSchema) -> None:
    """Make sure that the columns with a role have kinds that it allows."""
    numbers = schema.task in ("regression", "multilabel")
    roles = [(f"target of the task {schema.task}", name, numbers) for name in schema.targets]
    roles += [("weight", name, True) for name in (schema.weight,) if name is not None]
    for role, name, numeric in roles:
        kind = schema.kind(name)
        if kind == "date" or (numeric and kind != "numeric"):
            wanted = "numeric" if numeric else "numeric or categorical"
            raise DataError(
                f"column {name!r} is the {role}, but its kind is {kind}",
                f"give another column, or write {wanted} as its kind in the schema",
            )
    if schema.time is not None and schema.kind(schema.time) == "categorical":
        raise DataError(
            f"column {schema.time!r} is the time, but its kind is categorical",
            "give a column of numbers or of ISO 8601 dates",
        )
    if schema.time is not None and schema.group is not None:
        raise DataError(
            "the schema has a group and a time, and a table is split by one of them",
            "remove one of them",
        )


def wrong_roles(schema: TableSchema, columns: RawColumns) -> tuple[np.ndarray, str]:
    """Which rows have a weight below 0, or a label that is neither 0 nor 1.

    Args:
        schema: the table's schema.
        columns: the values of N rows.

    Returns:
        bool (N,), and what is said of the first such row: of its first value that is wrong.
    """
    found = np.zeros(len(next(iter(columns.values()))), bool)
    first, what = len(found), ""
    labels = schema.targets if schema.task == "multilabel" else ()
    for name in (*labels, *((schema.weight,) if schema.weight is not None else ())):
        values = columns[name]
        if name in labels:
            wrong, said = np.isfinite(values) & (values != 0) & (values != 1), "not 0 or 1"
        else:
            wrong, said = values < 0, "a weight below 0"
        if wrong.any() and (row := int(wrong.argmax())) < first:
            first, what = row, f"{name} is {values[row]:g}, {said}"
        found |= wrong
    return found, what
