"""`hpc-train submit CONFIG.yaml --scheduler slurm --nodes N ... [--section.key VALUE ...]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from hpc_train.cli.verb import COUNT, Parser, not_negative, show_help, wants_help
from hpc_train.launch import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        prog="hpc-train submit",
        usage="hpc-train submit CONFIG.yaml [--section.key VALUE ...] [options]",
        description="Write the batch script of a run, and queue it. The job stops with a "
        "checkpoint before its time is over, and is queued again until training is finished.",
    )
    made.add_argument("config", metavar="CONFIG.yaml", help="the configuration file of the run")
    made.add_argument(
        "--scheduler",
        choices=get_args(Scheduler),
        help="the scheduler (default: the one found here)",
    )
    made.add_argument("--site", help="site profile of the machine: its name, or a .yaml file")
    made.add_argument("--nodes", default=1, help="number of nodes (default: %(default)s)", **COUNT)
    made.add_argument(
        "--ranks_per_node", help="ranks on each node (default: the site's, or 1)", **COUNT
    )
    made.add_argument("--threads", help="cores of each rank", **COUNT)
    made.add_argument(
        "--time",
        metavar="HH:MM:SS",
        help="time limit of the job; D-HH:MM:SS and 1h30m work too (default: one hour)",
    )
    made.add_argument("--name", help="job name (default: the run directory's name)")
    made.add_argument("--account", help="account that pays for the job")
    made.add_argument("--queue", help="queue or partition")
    made.add_argument(
        "--directive",
        action="append",
        default=[],
        metavar="TEXT",
        help="a further directive for the scheduler, such as '--qos=debug'; several may follow, "
        "and the option may be repeated",
    )
    made.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a shell line that runs first, such as 'module load python' (default: activate this "
        "environment); several may follow, and the option may be repeated",
    )
    made.add_argument(
        "--launcher",
        choices=("srun", "mpirun", "horovodrun"),
        help="the launcher to use (default: `hpc-train launch`, which chooses one)",
    )
    made.add_argument(
        "--max_restarts",
        type=not_negative,
        metavar="K",
        help="maximum number of restarts within a job, after failures (default: 3)",
    )
    made.add_argument(
        "--requeue_by",
        choices=("requeue", "submit", "never"),
        help="how the job is queued again when it has stopped early",
    )
    made.add_argument(
        "--max_requeues",
        type=not_negative,
        metavar="N",
        help="maximum number of requeues (default: 50)",
    )
    made.add_argument(
        "--chain",
        default=1,
        help="number of jobs to queue now; each waits for the one before it (default: %(default)s)",
        **COUNT,
    )
    made.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=V,V",
        help="submit an array job with a task for each combination of values, such as "
        "optimizer.lr=1e-3,1e-4",
    )
    made.add_argument("--image", default="", help="container image, for mpijob")
    made.add_argument("--dry_run", action="store_true", help="print the script, and queue nothing")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if wants_help(arguments):
        return show_help(options(), arguments)
    from hpc_train.config import file

    own, keys = file.separate(_joined(arguments))
    given = options().parse_args(own)
    from hpc_train.launch.submit import SubmitRequest, submit

    for job in submit(SubmitRequest(**vars(given), options=keys)):
        print(job)
    return 0


def _joined(arguments: Sequence[str]) -> list[str]:
    """Join each value of --directive and --setup to its option, as in --directive=--qos=debug.

    The word after such an option is its value, whatever it begins with. Further values follow up to
    the next word that begins with a dash.
    """
    words: list[str] = []
    option = ""
    for word in arguments:
        if option and (words[-1] == option or not word.startswith("-")):
            if words[-1] == option:
                words.pop()
            words.append(f"{option}={word}")
        else:
            words.append(word)
            option = word if word in ("--directive", "--setup") else ""
    return words
