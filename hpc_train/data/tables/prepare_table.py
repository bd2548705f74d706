"""`hpc-train prepare table`: turn files of a table into shards with a manifest.

It is done in stages, whose portions the ranks share:

- quotes: each portion of a csv file that may have quoted line ends counts its quotes, so that all
  of them know where their records begin.
- rows: each portion's rows are parsed, and written to a file of typed columns.
- statistics: from these files come those of the training rows. Rank 0 puts them together and fixes
  the features.
- shards: the rows of each shard are taken from these files, and encoded.

A portion is finished when its entry is there, so a stage that was killed continues. No stage holds
more than a batch of rows in memory, besides one shard, and the statistics of a portion.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hpc_train.data.prepare.dealing import Dealing, make_portions
from hpc_train.data.prepare.partial import (
    Preparation,
    ShardPortion,
    held_partial,
    publish,
    writing_to,
)
from hpc_train.data.tables.stage_rows import begin_quotes, begin_rows, make_quotes, make_rows
from hpc_train.data.tables.stage_shards import (
    begin_shards,
    begin_statistics,
    make_shard,
    make_statistics,
    table_manifest_of,
)
from hpc_train.data.tables.table_manifest import TableManifest, parse_table_manifest
from hpc_train.data.tables.table_request import TableRequest

Begin = Callable[[TableRequest, Path], Preparation[Any]]
Make = Callable[[Dealing[Any], ShardPortion], None]
STAGES: tuple[tuple[Begin, Make], ...] = (
    (begin_quotes, make_quotes),
    (begin_rows, make_rows),
    (begin_statistics, make_statistics),
    (begin_shards, make_shard),
)


def prepare_table(request: TableRequest) -> TableManifest:
    """Prepare a table in this process alone.

    Returns:
        The manifest of the new folder.

    Raises:
        DataError: a file cannot be read, or has a wrong row; nothing can be learned of the rows; or
            the folder cannot be written.
        SetupError: a library is needed and missing.
    """
    with held_partial(request.target, request.key) as folder:
        for begin, make in STAGES:
            preparation = begin(request, folder)
            work_on(Dealing(preparation), make)
        return finish_table(preparation)


def work_on(dealing: Dealing[Any], make: Make) -> None:
    """Make portions of a stage until there is none left. Every rank calls.

    Raises:
        DataError: as `prepare_table`.
    """
    make_portions(dealing, partial(make, dealing))


def finish_table(preparation: Preparation[Any]) -> TableManifest:
    """Write the manifest, and give the data folder its name. Only rank 0 calls, after all others.

    Args:
        preparation: the last stage.

    Returns:
        The manifest of the new folder.

    Raises:
        DataError: the folder cannot be written.
    """
    with writing_to(preparation.target):
        text = table_manifest_of(preparation).to_json()
        manifest = parse_table_manifest(json.loads(text))  # so it passes all checks
        publish(preparation.shards, preparation.target, text)
    return manifest
