"""Stages of the preparation of a table. Each has portions, which the ranks share.

The folder of the preparation has a folder for each stage, as `partial` describes it, and

    cut.json      the portions of the table's files
    split.json    what divides the rows
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpc_train import files
from hpc_train.data.check import check_shard
from hpc_train.data.prepare.dealing import Dealing
from hpc_train.data.prepare.partial import (
    PLAN,
    Preparation,
    ShardPortion,
    load_plan,
    store_plan,
)
from hpc_train.data.tables.table_files import TableFile, TablePortion
from hpc_train.data.tables.table_manifest import TableShard
from hpc_train.errors import DataError

logger = logging.getLogger(__name__)

CUT, SPLIT = "cut.json", "split.json"
WRITTEN_BYTES = 1 << 20  # that are written or read at once

Planned = dict[str, tuple[int, Any]]
"""The size in bytes and the content of each portion of a stage, by its name."""


def begin_stage(
    folder: Path,
    target: Path,
    recipe: Any,
    plan: Callable[[], Planned],
) -> Preparation[Any]:
    """Begin a stage, or continue it. Only rank 0 calls.

    Args:
        folder: the stage's folder.
        target: the data folder to make.
        recipe: what the ranks have to know.
        plan: makes the plan, if there is none: the size in bytes and the content of each portion.
    """
    if not (folder / PLAN).exists():
        folder.mkdir(parents=True, exist_ok=True)
        store_plan(folder, plan(), 0)
    made = load_plan(target, folder, recipe, _is_sound)
    if made.portions:
        logger.info("stage %s, portions: %d", folder.name, len(made.portions))
    return made


def _is_sound(preparation: Preparation[Any], entry: Any) -> bool:
    """Whether the file of a finished portion is there."""
    if "file" not in entry:
        return True
    path = preparation.shards / entry["file"]
    try:
        if "shard" in entry:
            check_shard(path, TableShard(**entry["shard"]), entry["dtype"])
        return bool(path.stat().st_size == entry["nbytes"])
    except (DataError, OSError, TypeError):
        return False


def stage_entries(folder: Path) -> tuple[list[str], list[Any]]:
    """The names and the entries of a finished stage's portions, in their order."""
    names = [row[0] for row in json.loads((folder / PLAN).read_text(encoding="utf-8"))["portions"]]
    return names, [
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names
    ]


def finish_portion(dealing: Dealing[Any], portion: ShardPortion, name: str, tree: Any) -> None:
    """Give the durable file of a portion its place, and write the portion's entry.

    Args:
        dealing: this rank's dealing of the stage, whose scratch folder has the file.
        portion: the portion.
        name: the file's name; "" if there is none.
        tree: what the entry says of the portion, as JSON values.
    """
    preparation = dealing.preparation
    if name:
        path = dealing.scratch / name
        files.call("rename", os.rename, path, preparation.shards / name)
        files.sync_folder(preparation.shards)
    files.write_text(preparation.entry(portion.name), json.dumps(tree))
    dealing.tell(portion.nbytes)


def row_of_portion(portion: TablePortion) -> list[Any]:
    """A portion as JSON values; `portion_of_row` reads them back."""
    return [[*vars(portion.file).values()], *[*vars(portion).values()][1:]]


def portion_of_row(row: Any) -> TablePortion:
    """The portion that `row_of_portion` has written."""
    file, *rest = row
    return TablePortion(TableFile(*file), *rest)


def portion_sizes(portions: Sequence[TablePortion]) -> list[int]:
    """About how many bytes each portion has. Those of some formats count rows."""
    lengths: dict[str, int] = {}
    for one in portions:
        lengths[one.file.path] = lengths.get(one.file.path, 0) + one.end - one.begin
    return [
        one.file.nbytes * (one.end - one.begin) // max(1, lengths[one.file.path])
        for one in portions
    ]
