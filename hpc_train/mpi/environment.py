"""Reads a process's place in its job from the launcher's environment variables, before MPI_Init.

A rank must choose its GPU before MPI_Init, and a batch shell must be told apart from a rank. Both
can only be read from variables, which each launcher names differently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpc_train.errors import SetupError


class Names(NamedTuple):
    """The names of one launcher's variables; "" for one that it does not set."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# The MPI launchers come before Slurm, because mpirun in a batch script inherits the batch shell's
# SLURM_PROCID=0. Sources: the launchers' manuals; Slurm's srun(1) "OUTPUT ENVIRONMENT VARIABLES".
LAUNCHERS = (
    Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Names("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Names(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Names("Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Names("Cray PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    Names(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
    Names("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    Names("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", ""),
)
OF_TASKS = ("Slurm", "Flux", "jsrun")  # they start programs of any kind as tasks of a job
SRUN = next(names for names in LAUNCHERS if names.launcher == "Slurm")
YIELD = "OMPI_MCA_mpi_yield_when_idle"
# The number of ranks. `hpc-train launch --image` gives it to each container, where the launcher's
# variables may be hidden.
RANKS = "HPC_TRAIN_RANKS"
# Launchers that start ranks without MPI: each rank would train alone, in the same run directory.
WITHOUT_MPI = {
    "HOROVOD_RANK": "horovodrun --gloo",
    "TORCHELASTIC_RUN_ID": "torchrun",
}
# What launchers tell a rank besides its place, and no setting that a user may have made.
_OF_RANKS = re.compile(
    r"OMPI_(APP_CTX_|ARGV|COMMAND|COMM_WORLD_|FILE_LOCATION|FIRST_RANKS|NUM_APP_CTX|UNIVERSE_SIZE)"
    r"|OMPI_MCA_(ess(_|$)|initial_wdir$|mpi_oversubscribe$|pmix$|shmem_RUNTIME_QUERY_hint$)"
    r"|OMPI_MCA_orte_(app_num|bound_at_launch|ess_|hnp_uri|jobfam_session_dir|launch$)"
    r"|OMPI_MCA_orte_(local_daemon_uri|num_nodes|precondition_transports|top_session_dir)"
    r"|PMIX_(?!MCA_|INSTALL_PREFIX|PREFIX)|PMI_|PRTE_(?!MCA_|ALLOW_RUN_)|HYDI_|PALS_|MV2_COMM_WORLD"
    r"|HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_)"
)


@dataclass(frozen=True)
class Launch:
    """A process's place in its job as its launcher describes it.

    `local_rank` and `local_size` are None if the launcher does not set them. `size` is None if only
    MPI knows it, as with PALS and PMIx.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read the launcher's variables; None for a process that no MPI launcher started.

    If the launcher does not set the local rank or size, it is taken from the variables of another
    launcher that give this process the same rank and size. For instance `srun --mpi=pmi2` sets
    Hydra's rank and size, but the local rank only in Slurm's variables.

    Raises:
        SetupError: a launcher that does not start MPI ranks started this process, or a variable has
            no number.
    """
    environ = {name: value for name, value in environ.items() if value}
    launch = _by_mpi(environ)
    if launch is None or _is_of_task(environ, launch):
        for variable, launcher in WITHOUT_MPI.items():
            if variable in environ:
                raise SetupError(
                    f"started by {launcher}, which starts no MPI ranks",
                    "use mpirun, srun, or horovodrun with its default controller, MPI",
                )
    return launch


def _by_mpi(environ: Mapping[str, str]) -> Launch | None:
    """The place that the variables of a launcher of MPI ranks tell."""
    for names in LAUNCHERS:
        if names.rank in environ and names.size in environ:
            rank, size = _number(environ, names.rank), _number(environ, names.size)
            agreeing = [names, *(n for n in LAUNCHERS if _gives(environ, n, rank, size))]
            return Launch(
                names.launcher,
                rank,
                size,
                _first_number(environ, [n.local_rank for n in agreeing]),
                _first_number(environ, [n.local_size for n in agreeing]),
            )
    for names in LAUNCHERS:
        if names.launcher == "PALS" and names.rank in environ:
            rank, local = _number(environ, names.rank), (names.local_rank, names.local_size)
            numbers = [_first_number(environ, [name]) for name in local]
            return Launch(names.launcher, rank, None, *numbers)
    return None


def _is_of_task(environ: Mapping[str, str], launch: Launch) -> bool:
    """Whether this process may have only inherited its place, from a task of the batch system.

    All processes that torchrun or horovodrun starts in a task have the task's place. `srun
    torchrun` has as many tasks as torchrun has nodes, and horovodrun is one task. Other numbers
    tell of an srun that a process of torchrun has started.
    """
    by_task = launch.launcher in OF_TASKS or started_by_srun(environ, launch)
    return by_task and environ.get("GROUP_WORLD_SIZE", "1") == str(launch.size)


def launched_rank(environ: Mapping[str, str]) -> int:
    """This process's rank by its launcher's variables; 0 for one that no MPI launcher started."""
    try:
        launch = read_launch(environ)
    except SetupError:
        return 0
    return launch.rank if launch else 0


def started_by_srun(environ: Mapping[str, str], launch: Launch) -> bool:
    """Whether srun started this process as a rank, and not a daemon that has started the rank."""
    return _gives(environ, SRUN, launch.rank, launch.size)


def for_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which to start mpirun.

    If the user is root, it has the two variables without which Open MPI refuses to start as root.
    """
    consent = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**environ, **({} if os.geteuid() else consent)}


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is not to be a rank, and may start ranks of its own.

    It lacks what a launcher has told this process. The user's settings of launchers stay.
    """
    told = {*WITHOUT_MPI, RANKS, *(name for names in LAUNCHERS for name in names[1:])}
    return {
        name: value
        for name, value in environ.items()
        if name not in told and not _OF_RANKS.match(name)
    }


def ranks_yield(environ: Mapping[str, str]) -> bool:
    """Whether ranks that wait should leave their cores to others, because ranks share cores.

    `start_runtime` and the launcher's line set the variable where ranks of a node share cores.
    """
    return environ.get(YIELD) == "1"


def _gives(environ: Mapping[str, str], names: Names, rank: int, size: int | None) -> bool:
    """Whether a launcher's variables give a process this rank and size.

    Variables that the process has inherited from a batch shell or a daemon give another place.
    """
    return (environ.get(names.rank), environ.get(names.size)) == (str(rank), str(size))


def _number(environ: Mapping[str, str], name: str) -> int:
    """The number in a variable.

    Raises:
        SetupError: there is none.
    """
    if not re.fullmatch(r"[0-9]+", environ[name]):
        raise SetupError(
            f"the variable {name} is {environ[name]!r}, and launchers set it to a number",
            "unset it, or start the ranks by a launcher, such as mpirun or srun",
        )
    return int(environ[name])


def _first_number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    """The number at the start of the first of these variables that is set and has one.

    Slurm writes 2(x3) for three nodes with two tasks each.
    """
    values = (environ[name] for name in names if name in environ)
    found = (re.match(r"\d+(?=$|\(x\d+\)$)", value) for value in values)
    return next((int(match[0]) for match in found if match), None)
