"""`hpc-train stage [--environment PATH] [--data DIR ...] [--to DIR]`, on every rank of the job.

It copies the environment and data sets to the nodes' own disks, or removes them: `--clean`.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser, show_help

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_train.mpi.runtime import Runtime

NO_ENVIRONMENT = "none"


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        prog="hpc-train stage",
        usage="mpirun hpc-train stage [--environment PATH] [--data DIR ...] [--to DIR] [--clean]\n"
        "       hpc-train stage --where",
        description="Copy the Python environment and data sets to a disk of each node. The first "
        "node reads them once, and each node passes them on to the next one. Start at least one "
        "rank on each node.",
    )
    made.add_argument(
        "--environment",
        metavar="PATH",
        type=_environment,
        help="the virtual environment or conda environment to copy, or none "
        "(default: that of this program)",
    )
    made.add_argument(
        "--data",
        metavar="DIR",
        type=_expanded,
        nargs="+",
        action="extend",
        default=[],
        help="the folders of data sets to copy",
    )
    made.add_argument(
        "--to",
        metavar="DIR",
        type=_expanded,
        help="a folder on the nodes' own disks (default: $TMPDIR, or /tmp); the copies get a "
        "folder of the job in it",
    )
    made.add_argument(
        "--where", action="store_true", help="print the folder of the job's copies, and do no more"
    )
    made.add_argument(
        "--clean", action="store_true", help="remove the job's copies from all nodes instead"
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        return show_help(options())
    if "--where" in arguments:  # it needs no MPI: a job script asks it before any rank starts
        from hpc_train.staging.stage import copies_folder

        print(copies_folder(options().parse_args(arguments).to, os.environ))
        return 0
    from hpc_train.job.program import run as run_program

    return run_program(lambda runtime: _run(arguments, runtime), ask_scheduler=False)


def _expanded(text: str) -> Path:
    """A path in which the job may have set variables.

    Raises:
        ArgumentTypeError: a variable in it is not set, or there is no user of its ~name.
    """
    path = os.path.expandvars(text)
    if "$" in path:
        raise ArgumentTypeError(f"{text!r} has a variable that is not set")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ArgumentTypeError(f"{text!r}: there is no user {Path(path).parts[0][1:]}") from None


def _environment(text: str) -> Path | str:
    return text if text == NO_ENVIRONMENT else _expanded(text)


def _run(arguments: Sequence[str], runtime: Runtime) -> None:
    from hpc_train.staging.environment import own_environment
    from hpc_train.staging.stage import StageRequest, clean, stage

    given = options().parse_args(arguments)
    if given.clean:
        clean(runtime, given.to)
        return
    environment = own_environment() if given.environment is None else given.environment
    if given.environment == NO_ENVIRONMENT:
        environment = None
    elif environment is not None:
        environment = environment.absolute()
    stage(runtime, StageRequest(given.to, environment, tuple(given.data)))
