"""`hpc-train report RUN [RUN ...]`: one HTML file that shows what runs have done, or a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import COUNT, Parser
from hpc_train.errors import UserError

if TYPE_CHECKING:
    from argparse import Namespace
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
    made.add_argument(
        "--serve",
        action="store_true",
        help="serve the page of running jobs until Ctrl-C, on 127.0.0.1 at an address that nobody "
        "can guess; no file is written",
    )
    made.add_argument("--port", help="with --serve: this port (default: a free one)", **COUNT)
    made.add_argument(
        "--socket", metavar="PATH", help="with --serve: a Unix socket of your own, not a port"
    )
    made.add_argument(
        "--refresh",
        help="with --serve: the seconds after which a browser asks for a newer page (default: 10)",
        **COUNT,
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    if given.serve:
        return _serve(given)
    for name in ("port", "socket", "refresh"):
        if getattr(given, name) is not None:
            raise UserError(
                f"--{name} is given without --serve", f"add --serve, or leave out --{name}"
            )
    from hpc_train import files
    from hpc_train.report.page import report_of
    from hpc_train.report.sources import distinct_runs

    runs = distinct_runs([Path(name) for name in given.runs])
    out = Path(given.out or "report.html")
    if not given.out and len(runs) == 1:
        out = runs[0] / "report.html"
    if out.is_dir():
        raise UserError(f"{out} is a folder", "give the name of a file by --out")
    _check_replaced(out)
    text = report_of(runs)
    try:
        if out.exists() and not out.is_file():  # a pipe or a device, which has no other content
            out.write_text(text, encoding="utf-8")
        else:
            files.write_text(out.resolve(), text)
    except BrokenPipeError:  # the reader has all that it wants
        raise
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror or error})", "give another file by --out"
        ) from error
    print(f"{out} ({len(text.encode()) / 1e6:.2f} MB)")
    return 0


def _check_replaced(out: Path) -> None:
    """Check that a file that would be replaced is a report, not somebody's configuration."""
    if out.is_file():
        with out.open("rb") as file:
            begin = file.read(64).lstrip().lower()
        if begin and not begin.startswith(b"<!doctype html"):
            raise UserError(f"{out} is there, and is no report", "give another file by --out")


def _serve(given: Namespace) -> int:
    if given.out:
        raise UserError("--out and --serve are both given", "give one of them")
    if given.socket and given.port:
        raise UserError("--socket and --port are both given", "give one of them")
    from hpc_train.report.page import LiveReport
    from hpc_train.report.serve import REFRESH_SECONDS, ServedReport, serve

    runs = [Path(name) for name in given.runs]
    report = ServedReport(runs, LiveReport(runs).html, given.refresh or REFRESH_SECONDS)
    serve(report, port=given.port or 0, path=Path(given.socket) if given.socket else None)
    return 0
