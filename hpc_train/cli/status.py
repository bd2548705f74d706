"""`hpc-train status [RUN ...]`: the jobs of runs, and how far they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train status",
        description="Show the jobs of runs in the queue, their steps and their checkpoints.",
    )
    made.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run directories (default: those below the working directory that `submit` made)",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    from hpc_train.launch.status import describe, find_runs

    runs = [Path(name) for name in given.runs] or find_runs(Path())
    for directory in runs:
        print(directory)
        for line in describe(directory):
            print(f"    {line}")
    if not runs:
        print("no run of `hpc-train submit` is below this directory")
    return 0
