"""The schema of a table: its columns, what they hold, and what is learned from which.

`hpc-train prepare table` finds one and writes it as YAML. A person can edit that file, and give it
back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, get_args

import yaml

from hpc_train.errors import DataError

ColumnKind = Literal["numeric", "categorical", "date", "ignored"]
TableTask = Literal["classification", "regression", "multilabel", "none"]
COLUMN_KINDS: tuple[str, ...] = get_args(ColumnKind)
TABLE_TASKS: tuple[str, ...] = get_args(TableTask)
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
SHOWN_NAMES = 20  # in a message


def repeated(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, in the order of their first places."""
    return [name for name, count in Counter(names).items() if count > 1]


def columns_beside(missing: str, names: Sequence[str]) -> str:
    """A remedy for a missing column: the name that is most like it, and the names that are there.

    Args:
        missing: the name of no column.
        names: the names of the columns.
    """
    plain = {name.strip().casefold(): name for name in reversed(names)}
    near = get_close_matches(missing.strip().casefold(), plain, n=1)
    meant = f"did you mean {plain[near[0]]!r}? Its" if near else "its"
    shown = [name if name == name.strip() else repr(name) for name in names[:SHOWN_NAMES]]
    return f"{meant} columns are {', '.join(shown)}" + ", ..." * (len(names) > SHOWN_NAMES)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Args:
        name: its name. It is unique in the table.
        kind: what it holds. Numeric columns hold numbers or truth values, categorical ones any text
            or numbers that are names, dates are ISO 8601 or a type of the file. Ignored columns are
            not read.
    """

    name: str
    kind: ColumnKind


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """All columns of a table, and the roles of some of them.

    A column with a role is no feature.

    Args:
        columns: the columns, in the order of the files.
        task: what is predicted; "none" if the table is for pretraining only.
        targets: the columns that are predicted: one, or for "multilabel" one for each label, or
            none for the task "none".
        group: a column whose equal values stay in one split; None: there is none.
        time: a column by whose value the table is split, so that later rows are held out; None:
            there is none.
        weight: a column with the weight of each row, a number from 0; None: all rows weigh 1.
        missing: texts that stand for a missing value.
    """

    columns: tuple[Column, ...]
    task: TableTask
    targets: tuple[str, ...]
    group: str | None = None
    time: str | None = None
    weight: str | None = None
    missing: tuple[str, ...] = MISSING

    def __post_init__(self) -> None:
        kinds = self._kinds
        if twice := repeated(column.name for column in self.columns):
            raise DataError(f"the table has two columns named {twice[0]!r}", "rename one of them")
        if self.task not in TABLE_TASKS:
            raise DataError(f"task is {self.task!r}", f"give one of {', '.join(TABLE_TASKS)}")
        roles = [*self.targets, *(n for n in (self.group, self.time, self.weight) if n is not None)]
        for name in roles:
            if name not in kinds:
                raise DataError(f"the table has no column {name!r}", columns_beside(name, [*kinds]))
            if kinds[name] == "ignored":
                raise DataError(f"column {name!r} has a role, but is ignored", "give another kind")
        if both := repeated(roles):
            raise DataError(
                f"column {both[0]!r} has two roles",
                "give each of the targets, the group, the time and the weight a column of its own",
            )
        most = {"none": 0, "multilabel": len(kinds)}.get(self.task, 1)
        if len(self.targets) > most or (self.task != "none" and not self.targets):
            raise DataError(
                f"the task {self.task} has {len(self.targets)} target columns",
                "give one target column, for multilabel one or more, and for none no column",
            )
        if not self.features:
            raise DataError(
                "no column is a feature: each is ignored or has a role",
                "give a table with more columns and with rows, or change kinds in the schema",
            )

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns that are features, in the order of the files."""
        roles = {*self.targets, self.group, self.time, self.weight}
        return tuple(c for c in self.columns if c.kind != "ignored" and c.name not in roles)

    def kind(self, name: str) -> ColumnKind:
        """The kind of a column.

        Raises:
            KeyError: there is no such column.
        """
        return self._kinds[name]

    @cached_property
    def _kinds(self) -> dict[str, ColumnKind]:
        return {column.name: column.kind for column in self.columns}

    def to_yaml(self) -> str:
        """The schema as YAML; `parse_schema` reads it back to an equal one."""
        return yaml.safe_dump(self.to_tree(), sort_keys=False, allow_unicode=True)

    def to_tree(self) -> dict[str, Any]:
        """The schema as plain JSON values; `schema_of_tree` reads them back."""
        tree = asdict(self) | {"columns": {column.name: column.kind for column in self.columns}}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in tree.items()}


def parse_schema(text: str, missing: Sequence[str] = MISSING) -> TableSchema:
    """Make a schema from the text of its file.

    Args:
        text: the text.
        missing: texts that stand for a missing value if the file does not have the key.

    Raises:
        DataError: the text is not a schema. The message names what is wrong.
    """
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or " ".join(str(error).split())
        place = f", line {mark.line + 1}" if mark else ""
        raise DataError(f"the schema is not YAML{place}: {said}", "mend the file") from None
    _check_once(text)
    return schema_of_tree({"missing": [*missing], **tree} if isinstance(tree, dict) else tree)


def _check_once(text: str) -> None:
    """Check that the YAML text of a schema has no key or column twice: the last would count."""
    left = [("key", yaml.compose(text, yaml.SafeLoader))]
    for what, node in left:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        if twice := repeated(key.value for key, _ in pairs):
            raise DataError(f"the schema has the {what} {twice[0]!r} twice", "remove one of them")
        if what == "key":
            left += [("column", part) for key, part in pairs if key.value == "columns"]


def schema_of_tree(tree: Any) -> TableSchema:
    """Make a schema from the plain values of its file.

    Raises:
        DataError: the values are no schema. The message names what is wrong.
    """
    known = {field.name for field in fields(TableSchema)}
    if not isinstance(tree, Mapping) or not isinstance(tree.get("columns"), Mapping):
        raise DataError("the schema has no columns", "list them as NAME: KIND below `columns`")
    if unknown := [key for key in tree if key not in known]:
        raise DataError(
            f"the schema has the unknown key {unknown[0]!r}",
            f"remove it; the keys are {', '.join(field.name for field in fields(TableSchema))}",
        )
    columns = []
    for name, kind in tree["columns"].items():
        if kind not in COLUMN_KINDS:
            raise DataError(
                f"column {name!r} has the kind {kind!r}", f"give one of {', '.join(COLUMN_KINDS)}"
            )
        if name is None or isinstance(name, (bool, float)):
            raise DataError(
                f"the schema has a column whose name YAML reads as {name}",
                "write its name in quotes",
            )
        columns.append(Column(name=str(name), kind=kind))
    given: dict[str, Any] = {key: tree.get(key) for key in ("group", "time", "weight")}
    for key, value in given.items():
        if value is not None and not isinstance(value, str):
            raise DataError(f"{key} of the schema is {value!r}", "give the name of a column")
    for key in ("targets", "missing"):
        value = tree.get(key, MISSING if key == "missing" else [])
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            raise DataError(f"{key} of the schema is {value!r}", "give a list of texts")
        given[key] = tuple(value)
    task = tree.get("task", "classification")
    return TableSchema(columns=tuple(columns), task=task, **given)
