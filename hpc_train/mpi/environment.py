"""What a launcher tells its processes by environment variables, before MPI is initialised.

Devices have to be chosen before MPI_Init, and a batch shell has to be told apart from a rank:
both must be read from variables, which each launcher names differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hpc_train.errors import SetupError


class Names(NamedTuple):
    """One launcher's variables; the first of each that is set counts."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# The MPI launchers stand before Slurm: mpirun in a batch script inherits the batch shell's
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
    Names(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
    Names("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
)
# Launchers that start ranks without MPI: each rank would train alone, in the same run directory.
WITHOUT_MPI = {
    "HOROVOD_RANK": "horovodrun --gloo",
    "TORCHELASTIC_RUN_ID": "torchrun",
}


@dataclass(frozen=True)
class Launch:
    """A process's place in its job as its launcher describes it.

    `local_size` is None where the launcher does not tell.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int | None


def read(environ: Mapping[str, str]) -> Launch | None:
    """Read the launcher's variables; None for a process that no MPI launcher started.

    Raises:
        SetupError: a launcher that does not start MPI ranks started this process.
    """
    for names in LAUNCHERS:
        if names.rank in environ and names.size in environ:
            return Launch(
                names.launcher,
                int(environ[names.rank]),
                int(environ[names.size]),
                int(environ.get(names.local_rank, 0)),
                _first_number(environ.get(names.local_size)),
            )
    for variable, launcher in WITHOUT_MPI.items():
        if variable in environ:
            raise SetupError(
                f"started by {launcher}, which starts no MPI ranks",
                "use mpirun, srun, or horovodrun with its default controller, MPI",
            )
    return None


def for_launcher(environ: Mapping[str, str], uid: int) -> dict[str, str]:
    """The environment in which to start mpirun: Open MPI wants root's consent, given twice."""
    consent = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**environ, **(consent if uid == 0 else {})}


def visible_device(environ: Mapping[str, str], local_rank: int, devices: int) -> str | None:
    """The CUDA_VISIBLE_DEVICES that gives each local rank a GPU of its own, or None to leave it.

    Args:
        environ: may hold the scheduler's CUDA_VISIBLE_DEVICES, whose entries are then dealt out.
        local_rank: this rank's place on its node.
        devices: GPUs of the node.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    visible = [str(i) for i in range(devices)] if given is None else given.split(",")
    return visible[local_rank % len(visible)] if len(visible) > 1 else None


def _first_number(text: str | None) -> int | None:
    """The number a value starts with: Slurm writes 2(x3) for three nodes with two tasks each."""
    found = re.match(r"\d+(?=$|\(x\d+\)$)", text or "")
    return int(found[0]) if found else None
