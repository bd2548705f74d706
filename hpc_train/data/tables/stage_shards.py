"""The last stages of the preparation of a table: statistics of its rows, features and shards."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpc_train import files
from hpc_train.data.prepare.dealing import Dealing
from hpc_train.data.prepare.partial import Preparation, ShardPortion
from hpc_train.data.tables.features import RawColumns, TableFeatures
from hpc_train.data.tables.fixed import candidate_features, fix_features
from hpc_train.data.tables.row_files import lost_rows, read_batches
from hpc_train.data.tables.schema import TableSchema
from hpc_train.data.tables.splits import (
    HELD_OUT,
    LEFT_OUT,
    NEEDED_ROLES,
    SAMPLE_SEED,
    TRAIN,
    RowSplit,
    as_shares,
    portion_key,
    row_hashes,
)
from hpc_train.data.tables.stages import (
    CUT,
    SPLIT,
    WRITTEN_BYTES,
    Planned,
    begin_stage,
    finish_portion,
    portion_of_row,
    stage_entries,
)
from hpc_train.data.tables.statistics import (
    PortionStatistics,
    sampled_share,
    smallest,
    summaries_of,
)
from hpc_train.data.tables.table_manifest import (
    UNKNOWN_CLASS,
    TableManifest,
    TableShard,
    row_type,
)
from hpc_train.data.tables.table_request import TableRequest
from hpc_train.data.tables.targets import encode_target
from hpc_train.data.tables.write_table import encode_rows, write_table_shard
from hpc_train.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowsRecipe:
    """How the files of rows are used.

    Args:
        request: what the user wants.
        rows: the folder of the files of rows.
        split: how the rows are divided.
        share: share of the training rows that are looked at for quantiles.
        features: the features; None: they are not known yet.
        mean_weight: the mean weight of the training rows.
    """

    request: TableRequest
    rows: Path
    split: RowSplit
    share: float
    features: TableFeatures | None = None
    mean_weight: float = 1.0


def _batches(
    path: Path, schema: TableSchema, only: Collection[str] | None = None
) -> Iterator[tuple[np.ndarray, RawColumns]]:
    try:
        yield from read_batches(path, schema, only)
    except (ValueError, EOFError) as error:
        raise lost_rows(path, error) from None


def _keys(folder: Path, request: TableRequest) -> list[int]:
    """The key of each portion, from its file's path below the folder of all files."""
    paths = [Path(file.path).absolute() for file in request.files]
    common = os.path.commonpath([path.parent for path in paths])
    below = {
        file.path: os.path.relpath(path, common)
        for file, path in zip(request.files, paths, strict=True)
    }
    cut = json.loads((folder / CUT).read_text(encoding="utf-8"))
    portions = [portion_of_row(row) for row in cut]
    return [portion_key(below[one.file.path], one.begin) for one in portions]


def begin_statistics(request: TableRequest, folder: Path) -> Preparation[RowsRecipe]:
    """Plan to find the statistics of the training rows. Rank 0 calls, when all rows are parsed."""
    _, entries = stage_entries(folder / "rows")
    keys = _keys(folder, request)
    recipe = _recipe(request, folder, entries, keys)

    def plan() -> Planned:
        return {
            f"statistics-{number:05d}": (entry["nbytes"], [entry["file"], keys[number]])
            for number, entry in enumerate(entries)
        }

    return begin_stage(folder / "statistics", request.target, recipe, plan)


def _recipe(
    request: TableRequest, folder: Path, entries: Sequence[Any], keys: Sequence[int]
) -> RowsRecipe:
    rows = folder / "rows" / "shards"
    if not (folder / SPLIT).exists():
        named = [(rows / entry["file"], key) for entry, key in zip(entries, keys, strict=True)]
        total = sum(entry["rows"] for entry in entries)
        tree = {
            "cut": _time_cut(request, named, total),
            "share": sampled_share(total * (1 - request.options.validation)),
        }
        files.write_text(folder / SPLIT, json.dumps(tree))
    tree = json.loads((folder / SPLIT).read_text(encoding="utf-8"))
    split = RowSplit(request.schema, request.options.validation, tree["cut"])
    return RowsRecipe(request, rows, split, tree["share"])


def _time_cut(request: TableRequest, named: Sequence[tuple[Path, int]], total: int) -> float | None:
    """The time after which rows are held out: a quantile of the times of a sample of the rows."""
    schema, validation = request.schema, request.options.validation
    if schema.time is None or not validation:
        return None
    split, share = RowSplit(schema, 0.0), sampled_share(total)
    hashes, times = [np.empty(0, np.uint64)], [np.empty(0)]
    for path, key in named:
        for numbers, columns in _batches(path, schema, split.columns):
            found = row_hashes(key, numbers, SAMPLE_SEED)
            kept = (as_shares(found) < share) & (split.of(key, numbers, columns) == TRAIN)
            hashes.append(found[kept])
            times.append(columns[schema.time][kept])
    sample = np.concatenate(times)[smallest(np.concatenate(hashes))]
    if not len(sample):
        return None
    return float(np.quantile(sample, 1 - validation, method="inverted_cdf"))


def make_statistics(dealing: Dealing[RowsRecipe], portion: ShardPortion) -> None:
    """Find the statistics of a portion's training rows."""
    recipe = dealing.preparation.recipe
    schema = recipe.request.schema
    source, key = dealing.preparation.content(portion)
    found = PortionStatistics(schema, recipe.split, candidate_features(schema), recipe.share)
    for numbers, columns in _batches(recipe.rows / source, schema):
        found.add(key, numbers, columns)
        dealing.tell(0)
    name = f"{portion.name}.numbers"
    path = dealing.scratch / name
    with path.open("wb", WRITTEN_BYTES) as file:
        tree = found.write(file)
    files.sync(path)
    whole = {"file": name, "nbytes": path.stat().st_size, "statistics": tree}
    finish_portion(dealing, portion, name, whole)


def begin_shards(request: TableRequest, folder: Path) -> Preparation[RowsRecipe]:
    """Fix the features, and plan the shards. Rank 0 calls, when all statistics are found."""
    _, entries = stage_entries(folder / "statistics")
    written = folder / "statistics" / "shards"

    def opened(number: int) -> BinaryIO:
        path: Path = written / entries[number]["file"]
        return path.open("rb", WRITTEN_BYTES)

    trees = [entry["statistics"] for entry in entries]
    _check_rows(folder, trees)
    summaries = summaries_of(trees, opened)
    features = fix_features(request.schema, request.options.features, trees, opened, summaries)
    weights = summaries[-1]
    if request.schema.weight is not None and not weights.mean > 0:
        raise DataError("the weights of all training rows are 0", "give other weights")
    earlier = _recipe(request, folder, entries, [])
    recipe = replace(earlier, features=features, mean_weight=weights.mean or 1.0)

    def plan() -> Planned:
        return _planned_shards(request, features, folder, trees)

    return begin_stage(folder / "shards", request.target, recipe, plan)


def _wrong_rows(folder: Path) -> Counter[str]:
    """How many wrong rows were left out for each cause."""
    return sum((Counter(entry["causes"]) for entry in stage_entries(folder / "rows")[1]), Counter())


def _check_rows(folder: Path, trees: Sequence[Any]) -> None:
    """Make sure that there are rows to train on."""
    none = [0] * (LEFT_OUT + len(NEEDED_ROLES))  # there are no portions if there are no rows
    _, held_out, *without = rows = np.sum([none, *(tree["rows"] for tree in trees)], 0).tolist()
    if rows[TRAIN]:
        return
    lost = [
        *_wrong_rows(folder).most_common(),
        *((f"no {role}", count) for role, count in zip(NEEDED_ROLES, without, strict=True)),
        ("held out", held_out),
    ]
    told = ", ".join(f"{count} ({cause})" for cause, count in lost if count)
    raise DataError(
        f"no row is left to train on{f'; not taken are {told}' if told else ''}",
        "give a table with more rows that are right and have a target",
    )


def _row_counts(features: TableFeatures, trees: Sequence[Any]) -> dict[str, list[int]]:
    """Number of rows of each portion in each split."""
    held_out = [tree["rows"][HELD_OUT] for tree in trees]
    if features.target is not None and features.target.classes:
        known = features.target.classes
        held_out = [sum(tree["classes"][1].get(one, 0) for one in known) for tree in trees]
    return {"train": [tree["rows"][TRAIN] for tree in trees], "validation": held_out}


def _planned_shards(
    request: TableRequest, features: TableFeatures, folder: Path, trees: Sequence[Any]
) -> Planned:
    """The shards: all rows of a split in the order of the files, cut into equal parts."""
    _, sources = stage_entries(folder / "rows")
    keys = _keys(folder, request)
    per_shard = max(1, int(request.options.shard_mb * (1 << 20)) // row_type(features).itemsize)
    made: Planned = {}
    for split, counts in _row_counts(features, trees).items():
        ends = np.cumsum([0, *counts])
        total = int(ends[-1])
        number = -(-total // per_shard)
        bounds = [total * n // number for n in range(number + 1)] if number else []
        for place, (begin, end) in enumerate(pairwise(bounds)):
            first = int(np.searchsorted(ends, begin, "right")) - 1
            last = int(np.searchsorted(ends, end, "left"))
            parts = [
                [sources[n]["file"], keys[n], *_inside(ends, n, begin, end)]
                for n in range(first, last)
                if counts[n]
            ]
            nbytes = sum(sources[n]["nbytes"] for n in range(first, last))
            made[f"{split}-{place:05d}"] = (nbytes, parts)
    return made


def _inside(ends: np.ndarray, number: int, begin: int, end: int) -> tuple[int, int]:
    """Which rows of a portion lie in a range of a split: the first, and the one behind the last."""
    before = int(ends[number])
    return max(0, begin - before), min(int(ends[number + 1]), end) - before


def make_shard(dealing: Dealing[RowsRecipe], portion: ShardPortion) -> None:
    """Encode the rows of a shard."""
    recipe, parts = dealing.preparation.recipe, dealing.preparation.content(portion)
    assert recipe.features is not None
    split = portion.name.partition("-")[0]
    kind = row_type(recipe.features)
    rows = np.zeros(sum(end - begin for *_, begin, end in parts), kind)
    done = 0
    for source, key, begin, end in parts:
        place = 0  # of the next row of the split in the portion
        for numbers, columns in _batches(recipe.rows / source, recipe.request.schema):
            dealing.tell(0)
            chosen = _chosen(recipe, split, key, numbers, columns)
            kept = chosen[max(0, begin - place) : max(0, end - place)]
            place += len(chosen)
            if len(kept):
                _encode(recipe, columns, kept, rows[done : done + len(kept)])
                done += len(kept)
            if place >= end:
                break
    name = f"{portion.name}.h5"
    shard = write_table_shard(dealing.scratch / name, rows, recipe.features)
    tree = {"file": name, "nbytes": shard.file_bytes, "shard": asdict(shard)}
    tree["dtype"] = f"V{kind.itemsize}"
    finish_portion(dealing, portion, name, tree)


def _chosen(
    recipe: RowsRecipe, split: str, key: int, numbers: np.ndarray, columns: RawColumns
) -> np.ndarray:
    """The places of a split's rows in a batch, int64 (M,)."""
    assert recipe.features is not None
    wanted = recipe.split.of(key, numbers, columns) == (TRAIN if split == "train" else HELD_OUT)
    if split != "train":  # no training row has an unknown class
        wanted &= encode_target(recipe.features.target, columns)[1]
    return np.flatnonzero(wanted)


def _encode(recipe: RowsRecipe, columns: RawColumns, kept: np.ndarray, out: np.ndarray) -> None:
    assert recipe.features is not None
    needed = {*recipe.features.columns, *recipe.request.schema.targets}
    weight = recipe.request.schema.weight
    own = {name: columns[name][kept] for name in needed}
    weights = None if weight is None else columns[weight][kept] / recipe.mean_weight
    encode_rows(recipe.features, own, weights, out)


def table_manifest_of(preparation: Preparation[RowsRecipe]) -> TableManifest:
    """The manifest of the finished shards. Rank 0 calls."""
    recipe, folder = preparation.recipe, preparation.folder.parent
    assert recipe.features is not None
    statistics = stage_entries(folder / "statistics")[1]
    names, shards = stage_entries(preparation.folder)
    splits: dict[str, tuple[TableShard, ...]] = {}
    for name, entry in zip(names, shards, strict=True):
        split = name.partition("-")[0]
        splits[split] = (*splits.get(split, ()), TableShard(**entry["shard"]))
    wrong = _wrong_rows(folder).total()
    left_out = _left_out(recipe.features, [entry["statistics"] for entry in statistics])
    made = TableManifest(recipe.request.schema, recipe.features, wrong, left_out, splits)
    if recipe.request.options.validation and not made.rows("validation"):
        logger.warning("nothing is held out for validation: %s", _why_none(made.schema, left_out))
    return made


def _left_out(features: TableFeatures, trees: Sequence[Any]) -> dict[str, int]:
    """How many rows were left out for each reason, as the manifest has it."""
    rows = np.sum([tree["rows"] for tree in trees], 0).tolist()
    known = sum(_row_counts(features, trees)["validation"])
    counts = [
        *zip(NEEDED_ROLES, rows[LEFT_OUT:], strict=True),
        (UNKNOWN_CLASS, rows[HELD_OUT] - known),
    ]
    return {reason: count for reason, count in counts if count}


def _why_none(schema: TableSchema, left_out: Mapping[str, int]) -> str:
    """Why no row is held out, with what can be done."""
    if UNKNOWN_CLASS in left_out:
        return (
            f"all {left_out[UNKNOWN_CLASS]} rows for it have classes that no training row has; "
            f"{schema.targets[0]} may be no target of a classification"
        )
    if schema.group is not None:
        return "all groups are in training, as may be if they are few; give more --validation"
    if schema.time is not None:
        return "too many rows have the latest time; give more --validation or another --time"
    return "the rows are few; give more --validation"
