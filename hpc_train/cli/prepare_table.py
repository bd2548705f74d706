"""`hpc-train prepare table PATH... --target COLUMN --out DIR`: turn a table into shards."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from hpc_train.cli.shared_portions import add_row_options, share_portions
from hpc_train.cli.verb import positive
from hpc_train.errors import plural

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from typing import Any

    from hpc_train.data.tables.schema import TableSchema
    from hpc_train.data.tables.table_manifest import TableManifest
    from hpc_train.data.tables.table_request import TableRequest
    from hpc_train.mpi.group import Group
    from hpc_train.mpi.runtime import Runtime

ROLES = ("target", "task", "group", "time", "weight")  # options that a schema has, too


def add_table(kinds: Any) -> None:
    """Add the kind `table` to the verb's kinds."""
    table = kinds.add_parser(
        "table",
        help="tables: CSV, Parquet, npz and HDF5 files",
        description="Turn the files of a table into shards of rows: CSV (.csv, .tsv, also .gz and "
        ".zst), Parquet, NumPy (.npz) and HDF5 files. The types of the columns are found, or come "
        "from a schema. Features are made of the training rows alone.",
    )
    table.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders to search")
    table.add_argument("--out", default="", metavar="DIR", help="the data folder to write")
    table.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="COLUMN",
        help="the column to predict; give it once for each label with --task multilabel; give none "
        "for a table without a target",
    )
    table.add_argument(
        "--task",
        choices=("classification", "regression", "multilabel", "none"),
        help="what is predicted (default: what suits the target; at most 20 different whole "
        "numbers are classes)",
    )
    table.add_argument(
        "--group", metavar="COLUMN", help="rows with the same value stay in one split"
    )
    table.add_argument(
        "--time", metavar="COLUMN", help="the rows with the latest times are held out"
    )
    table.add_argument("--weight", metavar="COLUMN", help="the weight of each row, from 0")
    table.add_argument(
        "--validation",
        type=float,
        default=0.1,
        help="share of the rows that is held out for validation (default: %(default)s)",
    )
    table.add_argument(
        "--schema", metavar="FILE", help="the table's schema, with its target and other roles"
    )
    table.add_argument(
        "--write_schema", metavar="FILE", help="find the schema, write it to this file, and stop"
    )
    table.add_argument(
        "--max_categories",
        type=positive,
        default=1000,
        metavar="N",
        help="maximum number of categories of a column; the most frequent ones are kept (default: "
        "%(default)s)",
    )
    table.add_argument(
        "--bins",
        type=positive,
        default=48,
        metavar="N",
        help="maximum number of bins for a numeric column (default: %(default)s)",
    )
    table.add_argument(
        "--scaling",
        choices=("standard", "robust"),
        default="standard",
        help="scale numbers by mean and standard deviation, or by median and quartiles (default: "
        "%(default)s)",
    )
    add_row_options(table)
    table.add_argument(
        "--shard_mb",
        type=float,
        default=64.0,
        help="largest size of a shard in MiB, which each rank has in memory (default: %(default)s)",
    )


def run_table(given: Namespace, runtime: Runtime) -> None:
    """Prepare a table, or write its schema, as the options say. Collective."""
    from hpc_train.errors import ConfigError
    from hpc_train.mpi.agreement import from_first

    if bool(given.out) == bool(given.write_schema):
        raise ConfigError(
            "--out and --write_schema are both given"
            if given.out
            else "neither --out nor --write_schema is given",
            "give one of them",
        )
    if given.write_schema:
        schema = from_first(runtime.world, lambda: _write_schema(given))
        kinds = [column.kind for column in schema.columns]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        columns = plural(len(kinds), "column")
        runtime.print(f"{given.write_schema}: {columns} ({counts}), task {schema.task}")
        return
    manifest = prepare_table_together(runtime.world, lambda: _request(given))
    runtime.print(f"{given.out}: {_told(manifest)}")


def _told(manifest: TableManifest) -> str:
    features, target = manifest.features, "no target"
    if (of := features.target) is not None:
        target = f"target {', '.join(of.names)} ({of.task})"
        if of.classes:
            target = f"target {of.names[0]} of {len(of.classes)} classes"
    left_out = manifest.left_out
    assert not isinstance(left_out, int)  # a new manifest has the reasons
    why = ", ".join(
        f"{count} {'of an unknown class' if reason == 'class' else f'without a {reason}'}"
        for reason, count in left_out.items()
    )
    return (
        f"{plural(manifest.rows('train'), 'row')} to train on, {manifest.rows('validation')} held "
        f"out, {len(features.numeric)} numeric and "
        f"{plural(len(features.categorical), 'categorical feature')}, {target}, "
        f"{plural(manifest.wrong, 'wrong row')} and "
        f"{plural(sum(left_out.values()), 'other')} left out{f' ({why})' if why else ''}"
    )


def _schema(given: Namespace) -> TableSchema:
    """The schema that was given, or the one that is found in the files."""
    from pathlib import Path

    from hpc_train.data.tables.infer import infer_schema, usual_missing
    from hpc_train.data.tables.schema import parse_schema
    from hpc_train.data.tables.sources import list_tables
    from hpc_train.errors import ConfigError, DataError

    if given.schema:
        if both := [role for role in ROLES if getattr(given, role)]:
            raise ConfigError(
                f"--schema and --{both[0]} are both given", f"write the {both[0]} into the schema"
            )
        try:
            text = Path(given.schema).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{given.schema} cannot be read ({error})", "give a file") from None
        return parse_schema(text, usual_missing(list_tables(given.paths)))
    targets, task = given.target, given.task
    if targets == ["none"] and task in (None, "none"):
        targets, task = [], "none"
    if not targets and task is None:
        raise ConfigError("no target is given", "give --target COLUMN, or --task none")
    return infer_schema(
        list_tables(given.paths),
        targets=targets,
        task=task,
        group=given.group,
        time=given.time,
        weight=given.weight,
    )


def _write_schema(given: Namespace) -> TableSchema:
    from pathlib import Path

    from hpc_train import files
    from hpc_train.errors import DataError

    schema = _schema(given)
    path = Path(given.write_schema)
    if path.exists():
        raise DataError(f"{path} exists already", "give another file, or delete it first")
    try:
        files.write_text(path, schema.to_yaml())
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}", "give another file") from None
    return schema


def _request(given: Namespace) -> TableRequest:
    from hpc_train.data.tables.fixed import FeatureOptions
    from hpc_train.data.tables.table_request import TableOptions, table_request

    options = TableOptions(
        validation=given.validation,
        shard_mb=given.shard_mb,
        wrong=given.wrong_rows,
        quoted_newlines=not given.no_quoted_newlines,
        features=FeatureOptions(
            max_categories=given.max_categories, bins=given.bins, scaling=given.scaling
        ),
    )
    return table_request(given.paths, given.out, _schema(given), options)


def prepare_table_together(world: Group, make: Callable[[], TableRequest]) -> TableManifest:
    """Prepare a table on all ranks. Collective.

    Args:
        world: the ranks, which all see the data folder and the input.
        make: makes the request. Only rank 0 calls it.

    Returns:
        The manifest of the new folder, on all ranks.

    Raises:
        DataError: as `prepare_table`; on all ranks.
        SetupError: a library is needed and missing; on all ranks.
    """
    from hpc_train.data.prepare.partial import held_partial
    from hpc_train.data.tables.prepare_table import STAGES, finish_table, work_on
    from hpc_train.mpi.agreement import from_first

    with ExitStack() as held:  # rank 0 holds the partial folder until all ranks are ready

        def begun() -> tuple[TableRequest, Any]:
            request = make()
            return request, held.enter_context(held_partial(request.target, request.key))

        request, folder = from_first(world, begun)
        for begin, make_portion in STAGES:
            preparation = from_first(world, partial(begin, request, folder))
            share_portions(world, preparation, partial(work_on, make=make_portion))
        return from_first(world, lambda: finish_table(preparation))
