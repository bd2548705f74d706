"""`hpc-train data verify DIR [--each_node] [--json]`, on every rank of the job, and `data index`.

`verify` compares every shard of a data folder with its hash. The ranks divide the shards among
them. `index FILE...` writes down where the values of other people's HDF5 files lie.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser
from hpc_train.errors import DataError, HpcTrainError, plural, size_text, some_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_train.mpi.runtime import Runtime

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0  # seconds between two lines of progress
NAMES_SHOWN = 5  # names of damaged files in the error


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train data",
        description="Check a data folder that `hpc-train prepare` has made, or index HDF5 files.",
    )
    made.lists = "actions"
    actions = made.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    verify = actions.add_parser(
        "verify",
        help="check that the shards are what was prepared",
        description="Read every shard and compare its hash. Under a launcher the ranks divide the "
        "shards among them. The exit code is 1 if any file is damaged.",
    )
    verify.add_argument("folder", metavar="DIR", help="the data folder")
    verify.add_argument(
        "--each_node",
        action="store_true",
        help="have every node read all shards, for copies on the nodes' own disks",
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    index = actions.add_parser(
        "index",
        help="write down where the values of HDF5 and NetCDF-4 files lie",
        description="Write an index file beside each HDF5 or NetCDF-4 file: FILE.index.json. "
        "hpc_train.data.Arrays then reads the values without the HDF5 library. Index a file again "
        "when it has changed, and after a copy that does not keep its time. The exit code is 2 if "
        "a file cannot be read.",
    )
    index.add_argument("files", metavar="FILE", nargs="+", help="the files")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        options().parse_args(arguments)
    if arguments[:1] == ["index"]:
        index_files([Path(name) for name in options().parse_args(arguments).files])
        return 0
    from hpc_train.job.program import run as run_program

    return run_program(lambda runtime: _run(arguments, runtime))


def _run(arguments: Sequence[str], runtime: Runtime) -> None:
    given = options().parse_args(arguments)
    verify_data(runtime, given.folder, each_node=given.each_node, as_json=given.json)


def index_files(paths: Sequence[Path]) -> None:
    """Write the index file of each file, and print what can be read.

    Raises:
        DataError: some files cannot be read, or their index cannot be written.
    """
    from hpc_train.data.arrays.indexing import index_path, write_index

    failed = []
    for path in paths:
        try:
            readable, refused = write_index(path)
        except DataError as error:
            if len(paths) == 1:
                raise
            print(error.cause)
            failed.append(error)
            continue
        print(f"{index_path(path)}: variables that can be read: {', '.join(readable) or 'none'}")
        for name, why in refused.items():
            print(f"  {name} cannot be read: {why}")
    if failed:
        raise DataError(f"files that were not indexed: {len(failed)} of {len(paths)}", "see above")


def verify_data(
    runtime: Runtime, folder: str, *, each_node: bool = False, as_json: bool = False
) -> None:
    """Read all shards of a data folder, and print on rank 0 which files are damaged. Collective.

    Args:
        runtime: the ranks that share the work.
        folder: the data folder.
        each_node: whether the ranks of each node read the whole folder, for copies on the nodes'
            own disks; by default the ranks of all nodes read it together.
        as_json: print one JSON object, and no progress.

    Raises:
        HpcTrainError: a file of the folder is damaged; raised on all ranks.
        DataError: it is no data folder; raised on all ranks.
        UserError: the nodes have different data in folders of that name; raised on all ranks.
    """
    from hpc_train.data.check import damage, every_shard
    from hpc_train.data.tables.table_manifest import TableManifest, read_any_manifest
    from hpc_train.data.tokenizer import BYTES, NO_TOKENIZER, describe_tokenizer
    from hpc_train.mpi.agreement import agreed, same

    world, readers = runtime.world, runtime.node if each_node else runtime.world
    with agreed(world):
        directory = Path(folder)
        manifest = read_any_manifest(directory)
        tokenizer = BYTES if isinstance(manifest, TableManifest) else manifest.tokenizer
    same(world, f"the data in {directory}", manifest.digest, "copy the same data to all nodes")
    with agreed(world):
        every = every_shard(manifest)
        mine = every[readers.rank :: readers.size]
        progress = _Progress(sum(shard.nbytes(manifest.dtype) for shard in mine), quiet=as_json)
        found = [
            (shard.name, cause)
            for shard in mine
            if (cause := damage(directory / shard.name, shard, manifest.dtype, progress.add))
        ]
        if readers.rank == 0:
            try:
                describe_tokenizer(tokenizer, directory)
            except DataError as error:
                found.append((tokenizer, error.cause))
    damaged = [
        {"file": name, "rank": rank, "host": host, "cause": cause}
        for rank, (host, some) in enumerate(
            world.gathered((world.host, found), "the damage that the other ranks have found")
        )
        for name, cause in some
    ]
    nbytes = sum(shard.nbytes(manifest.dtype) for shard in every)
    if as_json:
        told = {"folder": folder, "shards": len(every), "bytes": nbytes, "damaged": damaged}
        runtime.print(json.dumps(told, indent=1))
    else:
        where = "rank {rank} ({host}): " if world.size > 1 else ""
        for one in damaged:
            runtime.print((where + "{cause}").format(**one))
    if damaged:
        total = len(every) + (tokenizer not in (BYTES, NO_TOKENIZER))
        names = sorted({str(one["file"]) for one in damaged})
        raise HpcTrainError(
            f"{folder}: damaged files: {len(names)} of {total}: {some_of(names, NAMES_SHOWN)}",
            "copy these files again, or prepare the data again",
        )
    if not as_json:
        what = "rows" if isinstance(manifest, TableManifest) else "tokens"
        runtime.print(
            f"{folder}: sound, {plural(len(every), 'shard')}, {size_text(nbytes)} of {what}"
        )


class _Progress:
    """Logs every few seconds how much of its shards this rank has read.

    Args:
        total: bytes of the shards' tokens.
        quiet: log nothing.
    """

    def __init__(self, total: int, *, quiet: bool) -> None:
        self.total, self.quiet = total, quiet
        self.done = 0
        self.begin = self.told = time.monotonic()

    def add(self, count: int) -> None:
        """Count bytes that have been read."""
        self.done += count
        now = time.monotonic()
        if self.quiet or now - self.told < PROGRESS_SECONDS:
            return
        self.told = now
        speed = self.done / (now - self.begin)
        left = (self.total - self.done) / speed
        text = "%.0f %% of this rank's shards read, %.0f MiB/s, %.0f s left"
        logger.info(text, 100 * self.done / self.total, speed / 2**20, left)
