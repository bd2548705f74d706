"""The command line: one module per verb, with its options and what it does.

A verb's module is imported when the verb runs. It imports what it needs when it needs it, so that
`--help` loads no library.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from hpc_train import __version__
from hpc_train.cli.verb import EXIT_CODES, Parser
from hpc_train.errors import HpcTrainError, UserError, print_error

if TYPE_CHECKING:
    from collections.abc import Sequence

# What `hpc-train --help` says of each verb. The module of the same name has `run(arguments)`.
VERBS = {
    "doctor": "tell what works here, and how to mend the rest",
    "prepare": "turn files into shards to train on",
    "data": "data verify DIR: check every shard of a data folder against its hash",
    "train": "train CONFIG.yaml: alone, or under horovodrun, mpirun, srun or mpiexec",
    "launch": "start a job's ranks by the launcher that is here, and restart them when they fail",
    "submit": "submit CONFIG.yaml: write a batch script, and queue it",
    "cancel": "stop a run for good, with a checkpoint",
    "plan": "plan CONFIG.yaml: list the layouts that fit, and how fast they are",
    "topology": "draw nodes and sockets, and where each rank and group of a layout lies",
    "generate": "write text from a checkpoint",
    "checkpoint": "list, verify, compare or export checkpoints",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hpc-train`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["train"] and (code := _started_warm(arguments)) is not None:
            return code
        if arguments and arguments[0] in VERBS:
            code = importlib.import_module(f"hpc_train.cli.{arguments[0]}").run(arguments[1:])
            return int(code)
        parser().parse_args(arguments)  # prints the help or the version, or finds the mistake
        raise UserError("the verb does not come first", "`hpc-train --help` lists the verbs")
    except HpcTrainError as error:
        print_error(error)
        return error.exit_code


def parser() -> Parser:
    """The options of the program itself, and the list of its verbs."""
    made = Parser(
        prog="hpc-train",
        description="Train PyTorch models on HPC clusters over MPI and Horovod.",
        epilog=EXIT_CODES,
    )
    made.lists = "verbs"
    made.add_argument("--version", action="version", version=f"hpc-train {__version__}")
    verbs = made.add_subparsers(
        title="verbs",
        description="`hpc-train VERB --help` lists the options of each.",
        dest="verb",
        metavar="VERB",
        required=True,
    )
    for name, text in VERBS.items():
        verbs.add_parser(name, help=text)
    return made


def _started_warm(arguments: list[str]) -> int | None:
    """Have the fork server of this node run the program; its exit code, or None to run it here."""
    from hpc_train.mpi import environment
    from hpc_train.warm import key, stand_in

    cold = "--cold" in arguments
    if cold:
        arguments.remove("--cold")
    launch = None if cold or stand_in.forked_by else environment.read_launch(os.environ)
    beside = launch is not None and (launch.local_size or 1) > 1
    if cold or not (beside or key.WARM in os.environ):
        return None
    return stand_in.start_stand_in(["-m", "hpc_train", *arguments], sys.path[0])
