"""`hpc-train report RUN [RUN ...] [--out FILE]`: one HTML file that shows what runs have done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser
from hpc_train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train report",
        description="Write one HTML file about runs, which opens without a network: curves, time "
        "per step, restarts, layout, slow ranks, costs, configurations. The run directory of a "
        "sweep stands for its tasks. A job may write there at the same time.",
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    made.add_argument(
        "--out",
        metavar="FILE",
        help="the file (default: RUN/report.html for one run, ./report.html for several)",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    from hpc_train import files
    from hpc_train.report.page import report_of

    runs = [Path(name) for name in given.runs]
    out = Path(given.out or "report.html")
    if not given.out and len(runs) == 1:
        out = runs[0] / "report.html"
    if out.is_dir():
        raise UserError(f"{out} is a folder", "give the name of a file by --out")
    text = report_of(runs)
    try:
        files.write_text(out, text)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror or error})", "give another file by --out"
        ) from error
    print(f"{out} ({len(text.encode()) / 1e6:.2f} MB)")
    return 0
