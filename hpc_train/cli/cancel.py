"""`hpc-train cancel RUN`: stop a run for good, with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser("hpc-train cancel", description="Stop a run for good, with a checkpoint.")
    made.add_argument("run", metavar="RUN", help="a run directory")
    made.add_argument(
        "--now",
        action="store_true",
        help="also remove its jobs from the queue, and end those that run (scancel, qdel): they "
        "save only if their scheduler leaves them the time",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    from hpc_train.launch.cancel import cancel

    print(cancel(Path(given.run), now=given.now))
    return 0
