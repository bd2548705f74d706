"""`hpc-train status [RUN ...] [--watch N | --json]`: the jobs of runs, and how far they are."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import COUNT, Parser, make_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_train.launch.status import RunStatus

MOST_CURVE = 60  # characters of a curve
LEAST_REST = 48  # characters of a line beside its curve
LONGEST_PAUSE = 10**6  # seconds between two lines: the system cannot wait for ever larger numbers


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train status",
        description="Show the jobs of runs in the queue, their steps, their speed and their "
        "checkpoints. A terminal also shows curves of their last records.",
    )
    made.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run directories (default: those below the working directory that `submit` made)",
    )
    how = made.add_mutually_exclusive_group()
    how.add_argument("--watch", help="show it again every N seconds, until Ctrl-C", **COUNT)
    how.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    from hpc_train.launch.status import RunStatus, find_runs

    folders = [Path(name) for name in given.runs] or find_runs(Path())
    if given.json:
        from hpc_train.launch.status_tree import status_tree

        print(json.dumps([status_tree(folder) for folder in folders], indent=1))
        return 0
    runs = [RunStatus(folder) for folder in folders]
    if not runs:
        print("no run of `hpc-train submit` is below this directory")
    elif sys.stdout.isatty():
        _show(runs, given.watch)
    else:
        _print(runs, given.watch)
    return 0


def _print(runs: Sequence[RunStatus], again: int | None) -> None:
    """Print plain lines."""
    with suppress(KeyboardInterrupt):
        while True:
            for status in runs:
                print(status.run, *(f"    {line}" for line in status.lines()), sep="\n", flush=True)
            if not again:
                return
            time.sleep(min(again, LONGEST_PAUSE))


def _show(runs: Sequence[RunStatus], again: int | None) -> None:
    """Show the lines on a terminal, with curves if it has their characters."""
    from rich.live import Live
    from rich.text import Text

    from hpc_train.launch.recent import BLOCKS

    console = make_console()
    drawn = console.encoding.startswith("utf")
    width = max(8, min(MOST_CURVE, console.width - LEAST_REST)) if drawn else 0

    def text() -> Text:
        made = Text(no_wrap=bool(again), overflow="ellipsis")
        for status in runs:
            made.append(f"{status.run}\n", style="bold")
            for line in status.lines(width):
                made.append(f"    {line}\n", style="cyan" if set(line) & set(BLOCKS) else "")
        made.rstrip()
        return made

    if not again:
        console.print(text(), soft_wrap=True)
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(text(), refresh=True)
            time.sleep(min(again, LONGEST_PAUSE))
