"""`hpc-train scale CONFIG.yaml --nodes 1,2,4 [--weak] [options] [--section.key VALUE ...]`."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.verb import COUNT, Parser, join_values, not_negative, show_help, wants_help
from hpc_train.errors import plural

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from hpc_train.launch.request import SubmitRequest
    from hpc_train.scaling.study import ScaleRun, ScaleStudy

OF_STUDY = ("nodes", "name", "sweep", "chain", "requeue_by", "max_requeues")
"""Options of submit that a study sets itself."""
HERE = ("config", "options", "ranks_per_node", "scheduler")
"""What a study that runs here can use of a request."""


def counts(text: str) -> list[int]:
    """The value of an option that takes numbers of nodes, such as 1,2,4."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentTypeError(f"{text!r} is not a list of numbers of nodes, such as 1,2,4")
    return sorted({int(part) for part in parts})


def efficiency(text: str) -> float:
    """The value of an option that takes a share: 0.5, or 50%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.5 or 50%")
    return value


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        prog="hpc-train scale",
        usage="hpc-train scale CONFIG.yaml --nodes 1,2,4,8 [--section.key VALUE ...] [options]",
        description="Run a training for a few steps on several numbers of nodes, fit a model to "
        "the times of the steps, and write a page, a table and a paragraph for a proposal: "
        "scale.html, scale.csv and scale.txt. The same command continues a study that was "
        "stopped, and uses its finished runs again. All further options are those of `hpc-train "
        "submit`, such as --scheduler, --ranks_per_node, --time and --account. With --scheduler "
        "local the runs are started here, one after the other: on the hosts of the job that this "
        "command runs in, or else all on this machine.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--nodes", type=counts, required=True, metavar="N,N,...", help="the numbers of nodes"
    )
    way = made.add_mutually_exclusive_group()
    way.add_argument(
        "--strong",
        action="store_true",
        help="strong scaling, which is the default: data.batch is the same on all numbers of nodes",
    )
    way.add_argument(
        "--weak",
        action="store_true",
        help="weak scaling: data.batch is that of the smallest number of nodes, and grows in "
        "proportion",
    )
    made.add_argument(
        "--repeats", default=3, help="runs on each number of nodes (default: %(default)s)", **COUNT
    )
    made.add_argument(
        "--steps",
        default=40,
        help="steps of a run, with its warm-up (default: %(default)s)",
        **COUNT,
    )
    made.add_argument(
        "--warmup",
        type=not_negative,
        metavar="N",
        help="steps at the start of a run that do not count (default: a quarter of --steps)",
    )
    made.add_argument(
        "--out", metavar="DIR", help="folder of the study (default: the run.dir with -scale added)"
    )
    made.add_argument(
        "--jobs_at_once",
        type=not_negative,
        default=0,
        metavar="N",
        help="most jobs of the study that are in the queue at the same time; with 1 they never "
        "disturb each other (default: %(default)s, which sets no limit)",
    )
    made.add_argument(
        "--no_wait",
        action="store_true",
        help="submit the runs and do not wait for them; the same command reads them later",
    )
    made.add_argument(
        "--predict",
        type=counts,
        default=[],
        metavar="N,N,...",
        help="numbers of nodes to predict (default: 2, 4 and 8 times as many as were run)",
    )
    made.add_argument(
        "--least_efficiency",
        type=efficiency,
        default=0.5,
        metavar="SHARE",
        help="parallel efficiency below which more nodes are not worth it (default: %(default)s)",
    )
    made.add_argument(
        "--cores",
        help="where the runs are started here: cores of each host, as for `hpc-train launch`",
        **COUNT,
    )
    made.add_argument(
        "--dry_run", action="store_true", help="list the runs of the study, and start nothing"
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    from hpc_train.errors import EXIT_FAILURE, EXIT_STOPPED, HpcTrainError

    if wants_help(arguments):
        return show_help(options())
    from hpc_train.scaling.running import QueuedRuns, run_here

    given, study, request = read_study(arguments)
    if given.dry_run:
        for one in study.runs():
            print(f"{plural(one.nodes, 'node')}: {' '.join(one.options)}")
        return 0
    left = [one for one in study.runs() if study.result(one) is None]
    here = bool(left) and _runs_here(given, request)
    study.claim()
    if len(left) < study.repeats * len(study.nodes):
        say(f"{study.repeats * len(study.nodes) - len(left)} runs are finished already")
    try:
        if here:
            failed = run_here(study, request, left, say, given.cores)
        else:
            queued = QueuedRuns(study, request, given.jobs_at_once, say)
            failed = queued.submit(left, wait=not given.no_wait)
    except KeyboardInterrupt:
        say(f"stopped: the same command continues with {study.folder}")
        return EXIT_STOPPED
    _write(given, study, Path(request.config or "").stem)
    for one in failed:
        _say_failed(one)
    if failed and not study.results():
        raise HpcTrainError(
            "no run of the study has a result", f"read the outputs of the jobs in {study.folder}"
        )
    return EXIT_FAILURE if failed else 0


def read_study(arguments: Sequence[str]) -> tuple[Namespace, ScaleStudy, SubmitRequest]:
    """What the arguments of the verb ask for.

    Raises:
        UserError: an option is unknown, or has a value that it cannot have.
    """
    from hpc_train.cli.submit import VALUES, read_request
    from hpc_train.config import file
    from hpc_train.errors import UserError
    from hpc_train.launch.compose import LATER
    from hpc_train.monitoring.performance import usual_warmup
    from hpc_train.scaling.study import ScaleStudy

    if "--" in arguments:
        raise UserError(
            "scale takes CONFIG.yaml, and no command after --",
            "give a configuration: only `hpc-train train` measures itself",
        )
    own, keys = file.separate(join_values(arguments, VALUES))
    given, others = options().parse_known_args(own)
    if any(word.partition("=")[0] in ("--run.dir", "--run.performance_test") for word in keys):
        raise UserError(
            "scale is given run.dir or run.performance_test, which each run of a study has itself",
            "leave it out; --out names the folder, and --steps the number of steps",
        )
    request = read_request([*others, *keys])
    default = read_request(["CONFIG.yaml"])
    for name in OF_STUDY:
        if getattr(request, name) != getattr(default, name):
            raise UserError(f"--{name} cannot be given to scale", "leave it out")
    if not request.config:
        raise UserError("CONFIG.yaml is not given", "hpc-train scale my.yaml --nodes 1,2,4")
    config = file.load(request.config, keys, LATER)
    where = Path(config.run.dir)
    study = ScaleStudy(
        config,
        Path(given.out) if given.out else where.with_name(f"{where.name}-scale"),
        given.nodes,
        _ranks_per_node(request),
        given.weak,
        given.repeats,
        given.steps,
        usual_warmup(given.steps) if given.warmup is None else given.warmup,
    )
    study.check()
    return given, study, request


def _ranks_per_node(request: SubmitRequest) -> int:
    from hpc_train.launch.sites import load_site

    site = load_site(request.site).ranks_per_node if request.site else 1
    return request.ranks_per_node or site


def _runs_here(given: Namespace, request: SubmitRequest) -> bool:
    """Whether a study runs here, and not as jobs in a queue.

    Raises:
        UserError: it does, and an option is for jobs in a queue.
    """
    import os
    from dataclasses import fields

    from hpc_train.cli.submit import read_request
    from hpc_train.errors import UserError
    from hpc_train.launch.hosts import allocated

    inside = request.scheduler is None and request.site is None and allocated(os.environ)
    if not inside and request.scheduler != "local":
        if given.cores:
            raise UserError(
                "--cores is for runs that are started here, and these are jobs in a queue",
                "give --threads, the cores of each rank",
            )
        return False
    if given.no_wait or given.jobs_at_once:
        raise UserError(
            "--no_wait and --jobs_at_once are for jobs in a queue, and these runs are started here",
            "leave them out, or name a scheduler that has a queue",
        )
    default = read_request(["CONFIG.yaml"])
    for name in (one.name for one in fields(request) if one.name not in HERE):
        if getattr(request, name) != getattr(default, name):
            raise UserError(
                f"--{name} means nothing to a study that runs here",
                "leave it out, or name a scheduler that has a queue",
            )
    return True


def _write(given: Namespace, study: ScaleStudy, name: str) -> None:
    """Write the page, the table and the text of what is finished, and print the text."""
    from hpc_train import __version__, files
    from hpc_train.scaling.page import page
    from hpc_train.scaling.paragraph import paragraph
    from hpc_train.scaling.summary import as_csv, figures_of

    results = study.results()
    if not results:
        say(f"no run has a result yet: the same command reads them later, from {study.folder}")
        return
    figures = figures_of(
        results,
        weak=study.weak,
        least_efficiency=given.least_efficiency,
        most_nodes=study.most_nodes,
        can_run=study.can_run,
        targets=given.predict,
    )
    if missing := sorted({*given.predict} - {row.nodes for row in figures.rows}):
        say(
            f"nothing is predicted for --predict {','.join(map(str, missing))}: the model, which "
            "needs two numbers of nodes, gives no time there, or the batch cannot be divided so"
        )
    text = paragraph(figures, name, study.steps, study.warmup, study.config.run.steps)
    for suffix, content in (
        ("txt", f"{text}\n"),
        ("csv", as_csv(figures)),
        ("html", page(figures, name, text, __version__)),
    ):
        files.write_text(study.folder / f"scale.{suffix}", content)
    print(text)
    say(f"{study.folder}/scale.html, scale.csv and scale.txt are written")


def _say_failed(run: ScaleRun) -> None:
    from hpc_train.scaling.study import cause_of_failure

    say(f"{run.directory} has failed: {cause_of_failure(run) or 'read its output there'}")


def say(text: str) -> None:
    """Print a line of this verb on standard error."""
    print(f"hpc-train scale: {text}", file=sys.stderr, flush=True)
