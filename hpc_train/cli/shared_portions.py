"""What verbs share whose ranks divide portions of files among them."""

from __future__ import annotations

import os
import time
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Sequence
    from typing import Any

    from hpc_train.cli.verb import Parser
    from hpc_train.data.prepare.dealing import Dealing
    from hpc_train.data.prepare.partial import Preparation
    from hpc_train.mpi.group import Group
    from hpc_train.mpi.runtime import Runtime

WAIT_SECONDS = 0.05  # seconds between two looks of a rank that waits for the others


def run_on_files(
    options: Callable[[], Parser],
    action: Callable[[Sequence[str], Runtime], None],
    arguments: Sequence[str],
) -> int:
    """Run a verb that reads files of others, on every rank; returns the exit code.

    Args:
        options: makes the options of the verb.
        action: carries the verb out.
        arguments: the words behind the verb.
    """
    if {"-h", "--help"} & set(arguments):
        options().parse_args(arguments)
    from hpc_train.job.program import run as run_program

    if any(map(holds_hdf5, arguments)):
        from hpc_train.data.fork_server import start_workers

        start_workers()  # one of them looks into the files, as ranks never open HDF5
    return run_program(lambda runtime: action(arguments, runtime), ask_scheduler=False)


def holds_hdf5(path: str) -> bool:
    """Whether a path is that of an HDF5 file by its name, or a folder that has one."""
    from hpc_train.data.prepare.foreign import HDF5_SUFFIXES

    inside = (name for _, _, names in os.walk(path) for name in names)
    return any(name.lower().endswith(HDF5_SUFFIXES) for name in chain([path], inside))


def share_portions(
    world: Group, preparation: Preparation[Any], work: Callable[[Dealing[Any]], None]
) -> None:
    """Work on all ranks until all portions of a preparation are made. Collective.

    Args:
        world: the ranks.
        preparation: the preparation.
        work: makes portions until this rank gets no more.

    Raises:
        HpcTrainError: a rank has failed; on all ranks.
    """
    from hpc_train.data.prepare.dealing import Dealing
    from hpc_train.mpi.agreement import settle

    dealing = Dealing(preparation, world.rank, world.size)
    failure: Exception | None = None
    try:
        work(dealing)
    except Exception as error:  # noqa: BLE001  # all ranks raise it
        failure = error
    if world.comm is not None:
        everyone = world.comm.Ibarrier()
        with world.waiting("the portions of the other ranks"):
            while not everyone.Test():
                dealing.look()
                time.sleep(WAIT_SECONDS)
    settle(world, failure)


def add_row_options(parser: ArgumentParser) -> None:
    """Add the options of how the rows of a table are read."""
    parser.add_argument(
        "--wrong_rows",
        choices=("raise", "count"),
        default="raise",
        help="end at a row with a wrong value, or leave such rows out and count them (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--no_quoted_newlines",
        action="store_true",
        help="no quoted field of a CSV file has a line end in it, so that the files are read once",
    )
