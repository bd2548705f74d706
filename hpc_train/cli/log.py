"""`hpc-train log export RUN... --to TRACKER [--out DIR]`, without torch and MPI."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import Parser
from hpc_train.errors import ConfigError, HpcTrainError, plural, print_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_train.trackers.source import TrackedRun


def options() -> Parser:
    """The options of the verb."""
    made = Parser("hpc-train log", description="Pass on the records of runs (metrics.jsonl).")
    made.lists = "actions"
    actions = made.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    export = actions.add_parser(
        "export",
        help="write the records of runs for TensorBoard, MLflow, W&B, or as CSV",
        description="Write the records of runs for a tracker. A further call adds what is new, "
        "also while a job writes the run; metrics.csv is written anew. Of a run that has resumed, "
        "steps that were computed again replace the earlier ones.",
    )
    export.add_argument("runs", metavar="RUN", nargs="+", help="a run directory")
    export.add_argument(
        "--to",
        required=True,
        type=_tracker,
        metavar="TRACKER",
        help="tensorboard, mlflow, wandb, csv, or a class of yours as package.module:Class",
    )
    export.add_argument(
        "--out",
        metavar="DIR",
        help="write to DIR/NAME for the run directory NAME (default: to the run directory)",
    )
    return made


def _tracker(text: str) -> str:
    from hpc_train.trackers.choose import EXPORTS

    if text not in EXPORTS and ":" not in text:
        raise ArgumentTypeError(f"{text!r} is none of {', '.join(EXPORTS)}, package.module:Class")
    return text


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    given = options().parse_args(arguments)
    from hpc_train.trackers.source import TrackedRun

    paths = _with_records([Path(run) for run in given.runs])
    folders = [Path(given.out, path.resolve().name) if given.out else path for path in paths]
    for number in range(len(paths)):
        if folders[number] in folders[:number]:
            raise ConfigError(
                f"two runs have the name {folders[number].name}", "export them to two folders"
            )
    for path, folder in zip(paths, folders, strict=True):
        export_run(TrackedRun(path, folder), given.to)
    return 0


def _with_records(paths: Sequence[Path]) -> list[Path]:
    """The run directories that have records. For each other one a line is printed.

    Raises:
        UserError: none has records, or one is not there.
    """
    found = [path for path in paths if (path / "metrics.jsonl").is_file()]
    missing = [path for path in paths if not path.exists()]
    if missing or not found:
        path = (missing or paths)[0]
        raise ConfigError(f"{path} has no metrics.jsonl", "give the directory of a run")
    for path in paths:
        if path not in found:
            print_line(f"hpc-train log: {path} has no records yet: it is left out", sys.stderr)
    return found


def export_run(run: TrackedRun, to: str) -> None:
    """Write the records of a run that a tracker does not have yet, and print their number.

    Raises:
        UserError: the folder cannot be written or is that of another run, a library is missing, or
            another process exports.
        HpcTrainError: the tracker fails.
    """
    from hpc_train.trackers.choose import make_sink
    from hpc_train.trackers.feed import Feed, claim_folder

    try:
        claim_folder(run)
        feed = Feed(run, to, make_sink(run, to, exports=True))
        try:
            count = feed.pass_on()
        finally:
            feed.close()
    except OSError as error:
        raise ConfigError(
            f"{error.filename or run.folder} cannot be used ({error.strerror})",
            "give a run that you may read, and --out a folder that you may write to, or free space",
        ) from None
    except HpcTrainError:
        raise
    except Exception as error:  # whatever the tracker's library raises
        why = str(error).partition("\n")[0]
        raise HpcTrainError(
            f"the export of {run.path} to {to} failed ({type(error).__name__}: {why})",
            "correct that, and call it again: it adds what is missing",
        ) from error
    print(
        f"{run.path}: {plural(count, 'record')} written to {to} in {run.folder}, up to step "
        f"{feed.step}"
    )
