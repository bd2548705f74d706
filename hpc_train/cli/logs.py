"""`hpc-train logs RUN [--follow] [--rank N]`: what the jobs of a run print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser, not_negative

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train logs",
        description="Print the newest output of a run's jobs. PBS may write it only when a job "
        "ends: until then it is the log of rank 0.",
    )
    made.add_argument("run", metavar="RUN", help="a run directory, or that of a task")
    made.add_argument(
        "--follow",
        "-f",
        action="store_true",
        help="continue until no job of the run is in the queue, or until Ctrl-C",
    )
    made.add_argument("--rank", type=not_negative, metavar="N", help="print the log of this rank")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    from hpc_train.launch.status import show_log

    show_log(Path(given.run), given.rank, follow=given.follow)
    return 0
