"""What a rank can tell, before MPI_Init, about the cores of the other ranks of its node.

All ranks of a node have to come to the same answer, because two that differ may choose one GPU. So
the answer depends on what they have in common: the machine, and the launcher's variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpc_train.host.numa import NumaNodes
from hpc_train.mpi.environment import Launch, started_by_srun


def expected_reach(
    environ: Mapping[str, str], launch: Launch, numa: NumaNodes, cpus: Iterable[int]
) -> list[dict[int, int]]:
    """For each local rank of this node, its distances to the NUMA nodes, as `NumaNodes.reach`.

    They are those of the cores that srun says it has bound the ranks to. Other launchers do not say
    it; they bind ranks in the order of the cores, unless they are told another order.

    Args:
        environ: the environment, with srun's variables.
        launch: this rank's place.
        numa: the NUMA nodes of this machine.
        cpus: the hardware threads that this rank is bound to.

    Returns:
        Nothing if the launcher does not say how many ranks the node has, if srun does not say their
        cores, or if ranks are not bound: one that may use cores of all NUMA nodes is not.
    """
    count = launch.local_size
    if launch.local_rank is None or count is None or launch.local_rank >= count:
        return []
    if started_by_srun(environ, launch):
        bound = _srun_masks(environ)
        return [numa.reach(its) for its in bound] if len(bound) == count else []
    mine = set(cpus)
    if all(its & mine for its in numa.cpus.values()):
        return []
    return [numa.reach(numa.part(rank, count)) for rank in range(count)]


def _srun_masks(environ: Mapping[str, str]) -> list[set[int]]:
    """The hardware threads of each task of this node, by srun(1), "OUTPUT ENVIRONMENT VARIABLES".

    slurmd writes the masks of all tasks there, those that it has chosen itself, too.
    """
    if not environ.get("SLURM_CPU_BIND_TYPE", "").endswith("mask_cpu:"):
        return []
    try:
        masks = [int(mask, 16) for mask in environ.get("SLURM_CPU_BIND_LIST", "").split(",")]
    except ValueError:
        return []
    return [{bit for bit in range(mask.bit_length()) if mask >> bit & 1} for mask in masks]
