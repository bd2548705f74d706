"""`hpc-train doctor [--json]`: check what works here, and say how to repair what does not.

A process that no launcher started must not touch MPI, because MPI may end it. It starts one rank as
a probe instead. Under a launcher every rank examines itself, and rank 0 reports. With --image the
checks are those of an image, in which the ranks of jobs are to run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hpc_train.cli.doctor.findings import ERROR, Finding, report, runs
from hpc_train.cli.verb import Parser, add_image_options, join_values, show_help
from hpc_train.errors import EXIT_FAILURE, UserError
from hpc_train.launch import PROGRAMS
from hpc_train.mpi import environment


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        "hpc-train doctor", description="Check what works here, and say how to repair the rest."
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--image", help="check this container image instead, in which the ranks of jobs are to run"
    )
    add_image_options(made)
    made.add_argument(
        "--launcher",
        choices=PROGRAMS,
        metavar="PROGRAM",
        help="the launcher that starts the ranks in the image (default: the first that works here)",
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        return show_help(options())
    given = options().parse_args(join_values(arguments, ["--image_options"]))
    launch = environment.read_launch(os.environ)
    if given.image:
        if launch is not None:
            raise UserError("--image starts ranks itself", "run it without a launcher")
        from hpc_train.cli.doctor import image

        found = image.examine_image(
            given.image, given.image_tool, given.image_options, given.launcher
        )
        print(report(found, [], as_json=given.json, where="in this image"))
        return 0 if runs(found) else EXIT_FAILURE
    if given.image_tool or given.image_options or given.launcher:
        raise UserError("an option of images is given, and no image", "give --image")
    findings, ranks = examine()
    if launch is None or launch.rank == 0:
        print(report(findings, ranks, as_json=given.json))
    return 0 if runs(findings) else EXIT_FAILURE


def examine() -> tuple[list[Finding], list[dict[str, Any]]]:
    """Run all checks. Under a launcher all ranks must call.

    Returns:
        The findings, and a description of each rank; ranks other than 0 have only their own.
    """
    from hpc_train.cli.doctor import checks
    from hpc_train.cli.doctor.probe import probe, probe_in_a_rank

    launch = environment.read_launch(os.environ)
    others = [checks.hdf5(), *checks.launchers()]
    component = mpirun = ""
    if launch is None or launch.rank == 0:  # before MPI starts: no fork after MPI_Init
        component, mpirun = checks.mpi_io_component(), checks.mpirun_version()
    alone = launch is None or launch.size == 1
    probed = probe_in_a_rank() if alone else probe()
    ranks = [rank for rank in probed if "error" not in rank]
    findings = [checks.python(), checks.torch(ranks), *others]
    if not ranks:
        return [*findings, Finding("MPI", ERROR, probed[0]["error"], probed[0]["remedy"])], []
    findings += [checks.mpi(ranks[0], mpirun), checks.horovod(ranks[0])]
    findings += [
        *checks.one_libmpi(ranks[0]),
        checks.mpi_io(ranks[0]["mpi"], component),
        checks.nodes(ranks),
        checks.binding(ranks),
        checks.devices(ranks),
    ]
    findings += checks.matrix_products(ranks)
    return findings, ranks
