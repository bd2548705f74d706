"""`hpc-train predict RUN TABLE... --out FILE`: predict the rows of a table, on every rank."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from hpc_train.cli.shared_portions import add_row_options, run_on_files, share_portions
from hpc_train.cli.verb import Parser, positive
from hpc_train.errors import ConfigError, plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpc_train.mpi.runtime import Runtime
    from hpc_train.training.predict import PredictOptions
    from hpc_train.training.predicted_rows import PredictionSummary


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train predict",
        description="Predict the rows of a table with the model of a checkpoint. Under a launcher "
        "the ranks share the work, and any number of them writes the same file. If the table has "
        "the target, the predictions are scored. The same command continues predictions that were "
        "stopped.",
    )
    made.add_argument(
        "checkpoint",
        metavar="RUN",
        help="a run directory for its newest checkpoint, or a checkpoint file",
    )
    made.add_argument(
        "paths",
        nargs="+",
        metavar="TABLE",
        help="files of the table (CSV, Parquet, npz, HDF5), or folders to search",
    )
    made.add_argument(
        "--out", required=True, metavar="FILE", help="the file to write, .parquet or .csv"
    )
    made.add_argument(
        "--columns",
        default="",
        metavar="NAME,NAME",
        help="columns of the table to copy beside the predictions; a name with a comma is quoted "
        "as in CSV",
    )
    made.add_argument(
        "--batch",
        type=positive,
        default=256,
        metavar="N",
        help="rows that the model computes at once (default: %(default)s)",
    )
    add_row_options(made)
    made.add_argument("--scores", metavar="FILE", help="write the scores to this JSON file")
    made.add_argument(
        "--no_scores",
        action="store_true",
        help="compute no scores, though the table has the target",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    return run_on_files(options, _run, arguments)


def _run(arguments: Sequence[str], runtime: Runtime) -> None:
    import json
    from pathlib import Path

    from hpc_train.training.predict import PredictOptions

    given = options().parse_args(arguments)
    wanted = PredictOptions(
        paths=given.paths,
        out=Path(given.out),
        columns=column_names(given.columns),
        batch=given.batch,
        wrong=given.wrong_rows,
        quoted_newlines=not given.no_quoted_newlines,
        score=not given.no_scores,
        scores=None if given.scores is None else Path(given.scores),
    )
    made = predict_together(runtime, given.checkpoint, wanted)
    runtime.print(
        f"{given.out}: {plural(made.rows, 'row')} predicted, "
        f"{plural(made.wrong, 'wrong row')} left out, "
        f"{plural(made.unknown, 'cell')} with unknown categories"
    )
    if made.scores is not None:
        runtime.print(json.dumps(made.scores))


def column_names(text: str) -> tuple[str, ...]:
    """The names of columns in the value of --columns.

    Raises:
        ConfigError: it is no line of CSV, or names a column twice.
    """
    import csv

    try:
        names = tuple(next(csv.reader([text], strict=True), ()))
    except csv.Error as error:
        raise ConfigError(
            f"--columns {text!r} cannot be read ({error})",
            "quote a name with a comma, a quote or a line end as in CSV",
        ) from None
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--columns names {twice[0]!r} twice", "name it once")
    return names


def predict_together(
    runtime: Runtime, checkpoint: str, wanted: PredictOptions
) -> PredictionSummary:
    """Predict the rows of a table on all ranks. Collective.

    Args:
        runtime: the ranks, which all see the files.
        checkpoint: a checkpoint file, or a run directory.
        wanted: what to predict.

    Raises:
        CheckpointError, CheckpointMismatch: as `load_model`; on all ranks.
        ConfigError: an option does not fit the table or another option; on all ranks.
        DataError: a file cannot be read or written, a column is missing, or a row is wrong; on all
            ranks.
        SetupError: a library is needed and missing; on all ranks.
    """
    import torch

    from hpc_train.data.prepare.partial import held_partial
    from hpc_train.data.tables.prepare_table import work_on
    from hpc_train.data.tables.stage_rows import begin_quotes, begin_rows, make_quotes
    from hpc_train.mpi.agreement import agreed, from_first
    from hpc_train.training.device import choose_device, use_cores
    from hpc_train.training.predict import (
        PredictionPlan,
        TablePredictor,
        loss_of_checkpoint,
        plan_predictions,
        single_threads,
    )
    from hpc_train.training.predicted_rows import put_together
    from hpc_train.training.trained import load_model

    world = runtime.world
    use_cores(runtime)
    device = choose_device(runtime.node.rank)
    trained = load_model(checkpoint, "tables", device, world)
    with ExitStack() as held:  # rank 0 holds the partial folder until all ranks are ready

        def begun() -> PredictionPlan:
            plan = plan_predictions(trained, wanted)
            folders.append(held.enter_context(held_partial(plan.request.target, plan.key)))
            return plan

        folders: list[Path] = []  # on rank 0
        plan = from_first(world, begun)
        quotes = from_first(world, lambda: begin_quotes(plan.request, folders[0]))
        share_portions(world, quotes, partial(work_on, make=make_quotes))
        rows = from_first(world, lambda: begin_rows(plan.request, folders[0]))
        count = torch.get_num_threads() if device.type == "cpu" else 1
        with agreed(world):
            predictor = TablePredictor(
                trained, plan, wanted.batch, held.enter_context(single_threads(count))
            )
        share_portions(world, rows, partial(work_on, make=predictor.make_part))
        loss = loss_of_checkpoint(trained)
        return from_first(world, lambda: put_together(rows, plan.columns, loss, wanted.scores))
