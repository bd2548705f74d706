"""`hpc-train profile RUN`: record what the ranks of a running job do in its next steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import COUNT, Parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train profile",
        description="Record what the ranks of a running job do in its next steps, and print the "
        "path of the trace, which https://ui.perfetto.dev opens.",
    )
    made.add_argument("run", metavar="RUN", help="the directory of a run that is running")
    made.add_argument(
        "--steps",
        default=5,
        help="number of steps, at most 100 if torch.profiler runs (default: 5)",
        **COUNT,
    )
    made.add_argument(
        "--ranks",
        default="0",
        help="ranks on which torch.profiler runs as well: all, none, or numbers such as 0,3 or 0-7 "
        "(default: 0)",
    )
    waiting = made.add_mutually_exclusive_group()
    waiting.add_argument(
        "--timeout",
        default=600,
        help="seconds that the job has to begin, which it does after a step (default: 600)",
        **COUNT,
    )
    waiting.add_argument(
        "--no_wait", action="store_true", help="ask the job, and do not wait for the trace"
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    from hpc_train.launch.profile_request import ProfileRequest

    asked = ProfileRequest(Path(given.run), given.steps, given.ranks)
    if given.no_wait:
        print(f"asked; the trace will be in {asked.folder}")
    else:
        print(asked.wait(given.timeout))
        if asked.note:
            print(asked.note, file=sys.stderr)
    return 0
