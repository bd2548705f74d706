"""`hpc-train submit CONFIG.yaml [--section.key VALUE ...] [options]`, or `... -- COMMAND`."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from hpc_train.cli.verb import (
    COUNT,
    Parser,
    add_image_options,
    gigabytes,
    join_values,
    not_negative,
    show_help,
    wants_help,
)
from hpc_train.launch import SchedulerName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_train.launch.request import SubmitRequest

VALUES = ("--directive", "--setup", "--image_options")  # options whose values may begin with a dash


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        prog="hpc-train submit",
        usage="hpc-train submit CONFIG.yaml [--section.key VALUE ...] [options]\n"
        "       hpc-train submit --run.dir DIR [options] -- COMMAND ...",
        description="Write the batch script of a run, and queue it. The job stops with a "
        "checkpoint before its time is over, and is queued again until training is finished. The "
        "words after -- are another program, which runs on each rank.",
    )
    made.add_argument(
        "config", nargs="?", metavar="CONFIG.yaml", help="the configuration file of the run"
    )
    made.add_argument(
        "--scheduler",
        choices=get_args(SchedulerName),
        help="the scheduler (default: the one found here)",
    )
    made.add_argument("--site", help="site profile of the machine: its name, or a .yaml file")
    made.add_argument("--nodes", default=1, help="number of nodes (default: %(default)s)", **COUNT)
    made.add_argument(
        "--ranks_per_node", help="ranks on each node (default: the site's, or 1)", **COUNT
    )
    made.add_argument(
        "--threads",
        help="cores of each rank (default: the site's, or an equal part of the node's if SLURM "
        "says how many these are, or 1)",
        **COUNT,
    )
    made.add_argument("--gpus", help="GPUs of each node (default: the site's)", **COUNT)
    made.add_argument(
        "--memory",
        type=gigabytes,
        metavar="GB",
        help="memory of each node, such as 64 or 64GB (default: the scheduler's)",
    )
    made.add_argument(
        "--time",
        metavar="HH:MM:SS",
        help="time limit of the job; D-HH:MM:SS and 1h30m work too (default: one hour)",
    )
    made.add_argument("--name", help="job name (default: the run directory's name)")
    made.add_argument("--account", help="account that pays for the job")
    made.add_argument("--queue", help="queue or partition; a QOS where the site's queues are these")
    made.add_argument("--qos", default="", help="quality of service (SLURM)")
    made.add_argument(
        "--constraint", default="", metavar="FEATURE", help="features of nodes (SLURM, Flux)"
    )
    made.add_argument("--reservation", default="", metavar="NAME", help="reservation (SLURM, LSF)")
    made.add_argument(
        "--exclusive", action="store_true", help="ask for nodes that no other job uses"
    )
    made.add_argument(
        "--mail", default="", metavar="ADDRESS", help="mail address that is told of the job's end"
    )
    made.add_argument(
        "--resources",
        default="",
        metavar="TEXT",
        help="what PBS is asked for instead of the usual nodes and ranks, such as "
        "'select={nodes}:ncpus=32:ngpus=4'; {cores}, {gpus} and {memory_gb} are those of all nodes",
    )
    made.add_argument(
        "--directive",
        action="append",
        default=[],
        metavar="TEXT",
        help="a further directive for the scheduler, such as '--qos=debug'; repeat the option for "
        "each of them",
    )
    made.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a shell line that runs first, such as 'module load python' (default: load this "
        "shell's modules, unless the site's profile has a setup, and activate this environment); "
        "several may follow, and the option may be repeated",
    )
    made.add_argument(
        "--launcher",
        choices=("launch", "srun", "mpirun", "horovodrun"),
        help="the launcher to use; launch is `hpc-train launch`, which restarts failed jobs and "
        "starts them by the site's line if there is one (default: the site's line, else launch)",
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
        help="number of jobs to queue now (SLURM, Flux); each waits for the one before it "
        "(default: %(default)s)",
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
    made.add_argument(
        "--tasks_at_once",
        help="most tasks of a sweep that run at the same time (SLURM, PBS, LSF)",
        **COUNT,
    )
    made.add_argument(
        "--image", default="", help="container image in which each rank runs: a file or a name"
    )
    add_image_options(made)
    made.add_argument(
        "--stage",
        action="store_true",
        help="copy the Python environment to a disk of each node before the ranks start, and "
        "remove the copies at the job's end",
    )
    made.add_argument(
        "--stage_data",
        action="append",
        default=[],
        metavar="DIR",
        help="the folder of a data set to copy, too: $HPC_TRAIN_STAGED/data/NAME; the option may "
        "be repeated",
    )
    made.add_argument(
        "--stage_to",
        metavar="DIR",
        help="a folder on the nodes' own disks (default: $TMPDIR of the job, or /tmp); the job may "
        "set variables for it",
    )
    made.add_argument("--dry_run", action="store_true", help="print the script, and queue nothing")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    if wants_help(["--", *arguments[:cut]]):
        return show_help(options())
    from hpc_train.launch.submit import submit

    for job in submit(read_request(arguments)).ids:
        print(job)
    return 0


def read_request(arguments: Sequence[str]) -> SubmitRequest:
    """What the arguments of the verb ask for.

    Raises:
        UserError: an option is unknown, or has a value that it cannot have.
    """
    from hpc_train.config import file
    from hpc_train.launch.request import SubmitRequest

    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    own, keys = file.separate(join_values(arguments[:cut], VALUES))
    given = options().parse_args(own)
    return SubmitRequest(**vars(given), options=keys, command=arguments[cut + 1 :])
