"""The first stages of the preparation of a table: its files become files of typed rows."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from hpc_train import files
from hpc_train.data.prepare.dealing import Dealing
from hpc_train.data.prepare.partial import Preparation, ShardPortion
from hpc_train.data.tables.features import RawColumns
from hpc_train.data.tables.row_files import write_batch
from hpc_train.data.tables.sources import count_quotes, cut_tables, read_rows, settle_quotes
from hpc_train.data.tables.stages import (
    CUT,
    WRITTEN_BYTES,
    Planned,
    begin_stage,
    finish_portion,
    portion_of_row,
    portion_sizes,
    row_of_portion,
    stage_entries,
)
from hpc_train.data.tables.table_files import RawRows
from hpc_train.data.tables.table_request import TableRequest, wrong_roles
from hpc_train.errors import DataError


def begin_quotes(request: TableRequest, folder: Path) -> Preparation[TableRequest]:
    """Plan to count the quotes of portions, as far as others need them. Rank 0 calls."""

    def plan() -> Planned:
        portions = cut_tables(request.files, quoted_newlines=request.options.quoted_newlines)
        files.write_text(folder / CUT, json.dumps([row_of_portion(one) for one in portions]))
        followed = [a.file == b.file for a, b in pairwise(portions)] + [False]
        sizes = portion_sizes(portions)
        return {
            f"quotes-{number:05d}": (sizes[number], row_of_portion(one))
            for number, one in enumerate(portions)
            if one.file.format == "csv" and one.quoted_newlines and followed[number]
        }

    return begin_stage(folder / "quotes", request.target, request, plan)


def make_quotes(dealing: Dealing[TableRequest], portion: ShardPortion) -> None:
    """Count the quotes of a portion."""
    count = count_quotes(portion_of_row(dealing.preparation.content(portion)))
    finish_portion(dealing, portion, "", {"quotes": count})


def begin_rows(request: TableRequest, folder: Path) -> Preparation[TableRequest]:
    """Plan to parse the rows of all portions. Rank 0 calls, when all quotes are counted."""

    def plan() -> Planned:
        portions = [
            portion_of_row(row) for row in json.loads((folder / CUT).read_text(encoding="utf-8"))
        ]
        names, entries = stage_entries(folder / "quotes")
        of_name = dict(zip(names, entries, strict=True))
        none = {"quotes": 0}
        counts = [of_name.get(f"quotes-{n:05d}", none)["quotes"] for n in range(len(portions))]
        settled, sizes = settle_quotes(portions, counts), portion_sizes(portions)
        return {
            f"rows-{number:05d}": (sizes[number], row_of_portion(one))
            for number, one in enumerate(settled)
        }

    return begin_stage(folder / "rows", request.target, request, plan)


def make_rows(dealing: Dealing[TableRequest], portion: ShardPortion) -> None:
    """Parse the rows of a portion, and write them to a file."""
    request = dealing.preparation.recipe
    source = portion_of_row(dealing.preparation.content(portion))
    name = f"{portion.name}.rows"
    path = dealing.scratch / name
    rows, causes = 0, Counter[str]()
    with path.open("wb", WRITTEN_BYTES) as file:
        for batch in read_rows(source, request.schema, request.options.wrong):
            numbers, columns = right_rows(batch, request)
            causes.update(batch.causes)
            causes["a wrong weight or label"] += len(batch.numbers) - len(numbers)
            rows += len(numbers)
            if len(numbers):
                write_batch(file, request.schema, numbers, columns)
            dealing.tell(0)
    files.sync(path)
    tree = {"file": name, "nbytes": path.stat().st_size, "rows": rows, "causes": causes}
    finish_portion(dealing, portion, name, tree)


def right_rows(batch: RawRows, request: TableRequest) -> tuple[np.ndarray, RawColumns]:
    """The rows of a batch whose weights and labels are allowed: their numbers and values.

    Raises:
        DataError: a row is wrong, and such rows are not to be left out.
    """
    faulty, what = wrong_roles(request.schema, batch.columns)
    if not what:
        return batch.numbers, batch.columns
    if request.options.wrong == "raise":
        raise DataError(
            f"{batch.where(int(batch.numbers[faulty][0]))}: {what}",
            "mend the file, or leave such rows out by --wrong_rows count",
        )
    kept = ~faulty
    return batch.numbers[kept], {name: values[kept] for name, values in batch.columns.items()}
