"""The manifest of a prepared table: its features, and the shards that have its rows.

A row is some words of 4 bytes, little-endian, all in one place: the numeric features (float32), the
codes of the categorical ones (int32), the target, and the row's weight (float32). The target is a
class number (int32), or a scaled value or one number for each label (float32).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.data.manifest import (
    HASHED_BYTES,
    LARGEST_SIZE,
    Manifest,
    check_format,
    check_hash,
    check_keys,
    check_number,
    checked_manifest,
    hash_of_manifest,
    parse_manifest,
    parse_splits,
    short_value,
)
from hpc_train.data.tables.features import DATE_PARTS, FIRST_CODE, TableFeatures, TargetValues
from hpc_train.data.tables.schema import TableSchema, schema_of_tree
from hpc_train.data.tables.splits import NEEDED_ROLES
from hpc_train.errors import DataError

TABLE_FORMAT = "hpc_train.table/1"
WORD_BYTES = 4
MOST_WORDS = 1 << 20  # of a row
UNKNOWN_CLASS = "class"  # the reason for which held-out rows are left out


@dataclass(frozen=True)
class TableShard:
    """One HDF5 file with contiguous, uncompressed datasets: `rows` and `hashes`.

    Offsets are positions in the file, in bytes.

    Args:
        name: file name in the data folder.
        file_bytes: size of the whole file.
        rows: number of rows, 1 or more.
        offset: offset of the first row.
        hashes_offset: offset of `hashes`. It has the xxh3-64 of each block of HASHED_BYTES of
            `rows`, uint64. The last block may be shorter.
        hash: xxh3-128 of the bytes of `hashes`, hexadecimal.
    """

    name: str
    file_bytes: int
    rows: int
    offset: int
    hashes_offset: int
    hash: str

    @property
    def source(self) -> str:
        """The shard has its rows itself."""
        return ""

    def nbytes(self, dtype: str) -> int:
        """Size of the rows in bytes, if their type is `dtype`."""
        return self.rows * np.dtype(dtype).itemsize

    def extents(self, dtype: str) -> dict[str, tuple[int, int]]:
        """The offset and the size in bytes of each dataset, if the rows' type is `dtype`."""
        nbytes = self.nbytes(dtype)
        return {
            "rows": (self.offset, nbytes),
            "hashes": (self.hashes_offset, 8 * -(-nbytes // HASHED_BYTES)),
        }


@dataclass(frozen=True)
class TableManifest:
    """A prepared table.

    Args:
        schema: its schema.
        features: its features and its target.
        wrong: number of rows that were left out because a value is wrong.
        left_out: number of rows that were left out for each reason: because their "target",
            "group", "time" or "weight" is missing, or because they are held out and no training row
            has their "class". Older manifests have the sum alone.
        splits: the shards of "train" and, if rows are held out, of "validation".
    """

    schema: TableSchema
    features: TableFeatures
    wrong: int
    left_out: Mapping[str, int] | int
    splits: Mapping[str, tuple[TableShard, ...]]

    def rows(self, split: str) -> int:
        """Number of rows of a split; 0 if the folder does not have the split."""
        return sum(shard.rows for shard in self.splits.get(split, ()))

    @property
    def limit(self) -> None:
        """Rows are no numbers."""
        return

    @cached_property
    def dtype(self) -> str:
        """NumPy's name for a row's bytes."""
        return f"V{row_type(self.features).itemsize}"

    def to_json(self) -> str:
        """The text of the manifest file."""
        return json.dumps({**self._tree(), "hash": self.digest}, indent=1) + "\n"

    @cached_property
    def digest(self) -> str:
        """A hash of the manifest. It is equal for equal rows in equal shards."""
        return hash_of_manifest(self._tree())

    def _tree(self) -> dict[str, Any]:
        return {
            "format": TABLE_FORMAT,
            "schema": self.schema.to_tree(),
            "features": self.features.to_tree(),
            "wrong": self.wrong,
            "left_out": self.left_out,
            "splits": {
                split: [asdict(shard) for shard in shards] for split, shards in self.splits.items()
            },
        }


def target_words(target: TargetValues | None) -> int:
    """Number of words of a row's target."""
    if target is None:
        return 0
    return len(target.names) if target.task == "multilabel" else 1


def row_type(features: TableFeatures) -> np.dtype[Any]:
    """The type of a row, as it is in a shard's dataset `rows`. HDF5 has no empty fields."""
    of = features.target
    kind = "<i4" if of is not None and of.task == "classification" else "<f4"
    every = [
        ("numeric", "<f4", len(features.numeric)),
        ("categorical", "<i4", len(features.categorical)),
        ("target", kind, target_words(of)),
        ("weight", "<f4", 1),
    ]
    return np.dtype([(name, form, (size,)) for name, form, size in every if size])


def read_table_manifest(directory: Path) -> TableManifest:
    """Read the manifest of a prepared table.

    Raises:
        DataError: there is no manifest, or it is damaged, or it is that of tokens.
    """
    return checked_manifest(directory, parse_table_manifest, "table")


def read_any_manifest(directory: Path) -> Manifest | TableManifest:
    """Read the manifest of a folder of tokens, or of a table.

    Raises:
        DataError: there is no manifest, or it is damaged.
    """
    return checked_manifest(directory, _parse_any, "text|tokens|table")


def _parse_any(tree: Any) -> Manifest | TableManifest:
    found = tree.get("format") if isinstance(tree, dict) else None
    of_table = isinstance(found, str) and found.partition("/")[0] == TABLE_FORMAT.partition("/")[0]
    return parse_table_manifest(tree) if of_table else parse_manifest(tree)


def parse_table_manifest(tree: Any) -> TableManifest:
    """Make a manifest from its file's JSON tree, and check every value.

    Raises:
        ValueError: a key is missing or unknown, a value is not allowed, or the values do not have
            the manifest's hash.
    """
    check_format(tree, TABLE_FORMAT)
    keys = [field.name for field in fields(TableManifest)]
    check_keys("the manifest", tree, ["format", *keys, "hash"])
    try:
        schema, features = schema_of_tree(tree["schema"]), TableFeatures.from_tree(tree["features"])
    except DataError as error:
        raise ValueError(error.cause) from None
    _check_features(features, schema)
    check_number("wrong", tree["wrong"], 0, LARGEST_SIZE)
    _check_left_out(tree["left_out"])
    dtype = f"V{row_type(features).itemsize}"
    shards = parse_splits(tree["splits"], TableShard, dtype)
    manifest = TableManifest(schema, features, tree["wrong"], tree["left_out"], shards)
    check_hash(tree, manifest.digest)
    return manifest


def _check_left_out(value: Any) -> None:
    counts = value if isinstance(value, dict) else {NEEDED_ROLES[0]: value}
    for reason, count in counts.items():
        check_number("left_out", count, 0, LARGEST_SIZE)
        if reason not in (*NEEDED_ROLES, UNKNOWN_CLASS):
            raise ValueError(f"left_out has the unknown key {short_value(reason)}")


def _check_features(features: TableFeatures, schema: TableSchema) -> None:
    """Check what `TableFeatures.from_tree` takes as it is."""
    kinds = {column.name: column.kind for column in schema.columns}
    for number in features.numeric:
        what = f"feature {short_value(number.name)}"
        wanted = "numeric" if number.part is None else "date"
        if not isinstance(number.column, str) or kinds.get(number.column) != wanted:
            raise ValueError(f"{what} is of no {wanted} column")
        if number.part is not None and number.part not in DATE_PARTS:
            raise ValueError(f"{what} is the part {short_value(number.part)} of a date")
        _check_scale(what, number.center, number.scale)
        _check_floats(f"{what}: edges", number.edges)
        with np.errstate(over="ignore"):
            edges = np.array(number.edges, np.float32)
        if len(edges) < 2 or not (edges[1:] > edges[:-1]).all():
            raise ValueError(f"{what}: its edges do not rise, or are fewer than two")
    for category in features.categorical:
        what = f"feature {short_value(category.name)}"
        if not isinstance(category.name, str) or kinds.get(category.name) != "categorical":
            raise ValueError(f"{what} is of no categorical column")
        _check_names(f"{what}: categories", category.categories)
        _check_floats(f"{what}: shares", category.shares)
        if len(category.shares) != FIRST_CODE + len(category.categories):
            raise ValueError(f"{what} has not one share for each code")
    names = [one.name for one in features.numeric] + [one.name for one in features.categorical]
    _check_names("names of features", names)
    if not 0 < len(names) <= MOST_WORDS:
        raise ValueError(f"it has {len(names)} features")
    if features.missing != schema.missing:
        raise ValueError("its features have other texts for missing values than its schema")
    _check_target(features.target, schema)


def _check_target(target: TargetValues | None, schema: TableSchema) -> None:
    if (schema.task == "none") != (target is None):
        raise ValueError("its features have another target than its schema")
    if target is None:
        return
    if (target.task, target.names) != (schema.task, schema.targets):
        raise ValueError("its features have another target than its schema")
    _check_names("classes", target.classes)
    _check_floats("shares of the target", target.shares)
    _check_scale("the target", target.center, target.scale)
    classes = len(target.classes)
    shares = {"multilabel": len(target.names), "classification": classes}.get(target.task, 0)
    if len(target.shares) != shares or (classes > 1) != (target.task == "classification"):
        raise ValueError("the target has other classes or shares than its task allows")


def _check_scale(what: str, center: Any, scale: Any) -> None:
    _check_floats(f"{what}: center and scale", (center, scale))
    if scale <= 0:
        raise ValueError(f"{what}: its scale is {scale}")


def _check_floats(what: str, values: Any) -> None:
    good = isinstance(values, tuple) and all(type(one) is float for one in values)
    if not good or not all(map(math.isfinite, values)):
        raise ValueError(f"{what} are {short_value(values)}, not a list of numbers")


def _check_names(what: str, values: Any) -> None:
    good = isinstance(values, (tuple, list)) and all(isinstance(one, str) for one in values)
    if not good or len({*values}) < len(values):
        raise ValueError(f"{what} are {short_value(values)}, not a list of different texts")
