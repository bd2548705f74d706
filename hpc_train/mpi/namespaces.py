"""Settings of MPI for a rank whose container has a user namespace of its own.

Ranks of a node copy large messages from each other's memory by the kernel's process_vm_readv
("cross memory attach"). Between user namespaces the kernel refuses it. Open MPI 4 then waits for
ever, and MPICH fails; Open MPI 5 notices it by itself. With the settings below messages go through
shared memory. Seen with Open MPI 4.1.8 and 5.0.10 and MPICH 5.0.2 in Apptainer 1.4.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from hpc_train.mpi.environment import RANKS

WITHOUT_ATTACH = {
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "MPIR_CVAR_CH4_CMA_ENABLE": "0",
}
# Apptainer and Singularity set the first two, and `hpc-train launch --image` the last. Others may
# share one namespace between the ranks of a node, and then the copies work.
OWN_CONTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", RANKS)
ALL_USERS = ["0", "0", "4294967295"]  # the map of a process that has no user namespace of its own
DAEMONS = ("mpirun", "mpiexec", "orted", "prted", "prterun", "hydra_pmi_proxy", "slurmstepd")


def own_namespace(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set before MPI starts, because this rank has a user namespace of its own.

    It is empty elsewhere, and where a launcher inside of the container has started all ranks.
    Settings of the user stay.

    Args:
        environ: the environment of this process.
    """
    if not any(name in environ for name in OWN_CONTAINER) or sees_all_users() or launched_inside():
        return {}
    return {name: value for name, value in WITHOUT_ATTACH.items() if name not in environ}


def sees_all_users() -> bool:
    """Whether this process is in the machine's own user namespace (user_namespaces(7))."""
    try:
        return Path("/proc/self/uid_map").read_text(encoding="utf-8").split() == ALL_USERS
    except OSError:  # a kernel without user namespaces
        return True


def launched_inside() -> bool:
    """Whether a launcher in this user namespace has started this process."""
    mine = Path("/proc/self/ns/user").readlink()
    with suppress(psutil.Error, OSError):  # the kernel refuses to tell of processes outside
        for process in psutil.Process().parents():
            if Path(f"/proc/{process.pid}/ns/user").readlink() != mine:
                return False
            if process.name() in DAEMONS:
                return True
    return False


def in_container(environ: Mapping[str, str]) -> bool:
    """Whether this rank was started in a container of its own."""
    return any(name in environ for name in OWN_CONTAINER)
