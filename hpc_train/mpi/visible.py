"""Which of a node's GPUs a rank sees: the variables that tell the driver, set before MPI_Init."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.errors import SetupError
from hpc_train.mpi.environment import Launch
from hpc_train.mpi.gpus import INTEL, Gpus
from hpc_train.mpi.group import Group
from hpc_train.mpi.nearest import nearest


def choices(environ: Mapping[str, str], gpus: Gpus) -> list[str]:
    """The GPUs that a job may use, as its environment names them.

    They are what the scheduler or the user has put into a variable, else all GPUs of the node.
    """
    name = _variable(environ, gpus)
    return _entries(environ[name]) if name in environ else [str(n) for n in range(gpus.count)]


def _entries(value: str) -> list[str]:
    """The GPUs that the value of a variable names."""
    found = list[str]()
    for entry in value.split(","):
        # CUDA stops at the first entry that is no GPU. Slurm writes NoDevFiles for none.
        if entry.strip() in ("", "-1", "NoDevFiles"):
            break
        found.append(entry.strip())
    return found


def offered(environ: Mapping[str, str], gpus: Gpus) -> Gpus:
    """The GPUs of a node that a job may use.

    A variable alone counts for nothing: a site's modules may set it on nodes without GPUs, too.
    """
    return Gpus(len(choices(environ, gpus)) if gpus.count else 0, gpus.vendor)


def _variable(environ: Mapping[str, str], gpus: Gpus) -> str:
    """The variable that chooses last among those that are set, else the vendor's own."""
    variables = gpus.vendor.variables
    return next((name for name in variables if name in environ), variables[0])


def _places(environ: Mapping[str, str], gpus: Gpus) -> list[int]:
    """For each of `choices`, its place in `gpus.each`; nothing if that of one is not known."""
    seen = list(range(len(gpus.each)))
    # Of several variables the last one chooses first, and one of the others among what it leaves.
    for name in dict.fromkeys((gpus.vendor.variables[-1], _variable(environ, gpus))):
        if name in environ:
            found = [_place(entry, seen, gpus) for entry in _entries(environ[name])]
            seen = [place for place in found if place is not None]
            if len(seen) < len(found):
                return []
    return seen


def _place(entry: str, seen: Sequence[int], gpus: Gpus) -> int | None:
    """The place of the GPU that an entry of a variable names; None if it is not known."""
    if entry.isdigit():
        return seen[int(entry)] if int(entry) < len(seen) else None
    # The beginning of a UUID is enough, if it is only one GPU's. A part of a GPU has another name.
    named = [n for n in seen if gpus.each[n].uuid.lower().startswith(entry.lower())]
    return named[0] if len(named) == 1 else None


def own_numa(environ: Mapping[str, str], gpus: Gpus) -> int:
    """The NUMA node of the one GPU that this rank sees; -1 if it is not known."""
    places = _places(environ, gpus)
    return gpus.each[places[0]].numa if len(places) == 1 else -1


def visible_device(
    environ: Mapping[str, str],
    launch: Launch,
    gpus: Gpus,
    reaches: Sequence[Mapping[int, int]] = (),
) -> dict[str, str]:
    """The variables to set so that each local rank sees a GPU of its own.

    Args:
        environ: the environment. If it has the scheduler's choice of GPUs, these are dealt out.
        launch: this rank's place.
        gpus: the node's GPUs.
        reaches: for each local rank, its distances to the NUMA nodes. Without them, the local rank
            is the GPU's number.

    Returns:
        The variables and their values; nothing if the rank sees no more than one GPU.

    Raises:
        SetupError: the rank sees several GPUs, and no launcher tells its local rank.
    """
    visible = _to_deal_out(environ, gpus)
    if len(visible) <= 1:
        return {}
    if launch.local_rank is None:
        if not gpus.count:  # a site's modules may set the variable even on nodes without GPUs
            return {}
        raise SetupError(
            f"rank {launch.rank} sees {len(visible)} GPUs, and {launch.launcher} "
            "does not tell its local rank on the node",
            "let the launcher show each rank one GPU, for instance by srun --gpus-per-task=1, or "
            "set MPI_LOCALRANKID",
        )
    if near := _near_device(environ, gpus, reaches, launch.local_rank):
        return near
    return {_variable(environ, gpus): visible[launch.local_rank % len(visible)]}


def _to_deal_out(environ: Mapping[str, str], gpus: Gpus) -> list[str]:
    """`choices`; nothing if SYCL's variable has chosen one already."""
    # It numbers what Level Zero's has left, and may have been set for each rank.
    chosen = gpus.vendor == INTEL and re.search(r":\d", environ.get("ONEAPI_DEVICE_SELECTOR", ""))
    return [] if chosen else choices(environ, gpus)


def _near_device(
    environ: Mapping[str, str], gpus: Gpus, reaches: Sequence[Mapping[int, int]], local_rank: int
) -> dict[str, str]:
    """The variables that show a rank a GPU near its cores; nothing if its local rank decides.

    The local rank decides if the distances are not known, and if all GPUs hang on one NUMA node. It
    also decides if the GPUs are not listed in the order of their numbers, because somebody has
    chosen that order. Schedulers list them in the order of the numbers.
    """
    places = _places(environ, gpus)
    nodes = [gpus.each[place].numa for place in places]
    known = all(node in reach for reach in reaches for node in nodes)
    if not reaches or not known or len(set(nodes)) < 2 or places != sorted(set(places)):
        return {}
    mine = nearest([[reach[node] for node in nodes] for reach in reaches])[local_rank]
    order = dict([gpus.vendor.by_pci] if gpus.vendor.by_pci else [])
    return {**order, _variable(environ, gpus): choices(environ, gpus)[mine]}


def nearer_device(
    node: Group, environ: Mapping[str, str], gpus: Gpus, reach: Mapping[int, int]
) -> dict[str, str]:
    """The variables to set once MPI runs, when ranks tell one another the cores they are bound to.

    These may be others than the ranks expected. Nothing changes if MPI itself has loaded the GPUs'
    driver, because the driver may have read the variables. Collective over the node.

    Args:
        node: the ranks of this node.
        environ: the environment before this rank chose a GPU.
        gpus: the node's GPUs.
        reach: this rank's distances to the NUMA nodes.
    """
    visible, loaded = _to_deal_out(environ, gpus), Path("/proc/self/maps").read_bytes()
    free = len(visible) > 1 and gpus.vendor.driver.encode() not in loaded
    everyone = node.gathered((free, visible, gpus, reach), "the cores of the ranks of its node")
    if not all(other[:3] == (True, visible, gpus) for other in everyone):
        return {}
    return _near_device(environ, gpus, [other[3] for other in everyone], node.rank)
