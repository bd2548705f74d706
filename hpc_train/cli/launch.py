"""`hpc-train launch -np N [-H h1:4,h2:4] [options] -- COMMAND`: start the ranks of a job."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from hpc_train.cli.verb import (
    COUNT,
    EXIT_CODES,
    Parser,
    add_image_options,
    join_values,
    not_negative,
    show_help,
    wants_help,
)
from hpc_train.errors import UserError
from hpc_train.launch import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        prog="hpc-train launch",
        usage="hpc-train launch [-np N] [-H node1:4,node2:4] [options] -- train CONFIG.yaml ...",
        description="Start a job's ranks with the launcher found here. The words after -- are the "
        "command of each rank: train CONFIG.yaml with its options, or any program.",
        epilog=EXIT_CODES,
    )
    made.add_argument("-np", dest="ranks", **COUNT, help="number of ranks (default: all slots)")
    made.add_argument(
        "-H", dest="hosts", metavar="HOSTS", help="hosts with their slots: node1:4,node2:4"
    )
    made.add_argument("--hostfile", metavar="FILE", help="hosts, one per line: node1 slots=4")
    made.add_argument(
        "--ranks_per_node",
        **COUNT,
        help="ranks to start on each host, overriding its slots",
    )
    made.add_argument(
        "--launcher",
        dest="program",
        choices=PROGRAMS,
        metavar="PROGRAM",
        help=f"the launcher to use: {', '.join(PROGRAMS)} (default: the first that works here)",
    )
    made.add_argument(
        "--line",
        help="your site's own launcher line, such as 'mpiexec -n {ranks} --ppn {ranks_per_node}'; "
        "launch adds the hosts",
    )
    made.add_argument(
        "--max_restarts",
        dest="restarts",
        type=not_negative,
        default=0,
        metavar="K",
        help="maximum number of restarts after failures (default: %(default)s); a restart leaves "
        "out hosts that do not answer, and uses hosts that -np had left over",
    )
    made.add_argument("--image", help="container image in which each rank runs: a file or a name")
    add_image_options(made)
    made.add_argument(
        "--cores",
        **COUNT,
        help="cores of each host (default: those of the SLURM job, or as many as this host has)",
    )
    made.add_argument(
        "--dry_run", action="store_true", help="print the launcher's line, and start nothing"
    )
    made.add_argument(
        "--cold",
        action="store_true",
        help="have every rank import its libraries itself; by default one process per node does",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    if wants_help(["--", *arguments[:cut]]):
        return show_help(options())
    from hpc_train.launch.protocol import STOP_SIGNALS

    # Signals wait until the supervisor handles them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return _launch(arguments, cut)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _launch(arguments: Sequence[str], cut: int) -> int:
    """Launch what stands after `--`, at position `cut`."""
    try:
        given = options().parse_args(join_values(arguments[:cut], ["--image_options"]))
    except UserError as error:
        if cut < len(arguments):
            raise
        remedy = "write the command after --: hpc-train launch -np 4 -- train my.yaml"
        raise UserError(error.cause, remedy) from None
    from hpc_train.launch.command import LaunchRequest, launch

    return launch(LaunchRequest(arguments[cut + 1 :], **vars(given)))
