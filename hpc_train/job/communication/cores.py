"""Whether the ranks have cores of their own: measurements of ranks that share cores mislead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from hpc_train.errors import plural
from hpc_train.host.cores import physical_cores
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import machine, socket_of

HOSTS_NAMED = 4


class BoundCores(NamedTuple):
    """The cores of a rank.

    Args:
        node: lowest rank of its node.
        host: its host.
        cores: the physical cores that it may run on, as `physical_cores` names them.
        spread: whether these lie in several NUMA domains or sockets, though the node has several.
    """

    node: int
    host: str
    cores: frozenset[str]
    spread: bool


def cores_of_ranks(runtime: Runtime) -> list[BoundCores]:
    """The cores of all ranks. Collective."""
    first = runtime.node.from_first(lambda: runtime.world.rank)
    mine, hardware = os.sched_getaffinity(0), machine()
    spread = max(hardware.numa, hardware.sockets) > 1 and socket_of(mine) < 0
    own = BoundCores(first, runtime.world.host, frozenset(physical_cores(mine)), spread)
    return runtime.world.gathered(own, "the cores of all ranks")


def binding_advice(ranks: Sequence[BoundCores]) -> list[str]:
    """What is wrong with the cores of the ranks, one sentence for each kind of mistake."""
    nodes: dict[int, list[BoundCores]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    few, bound, spread = [], [], []
    for on in nodes.values():
        cores = frozenset().union(*(rank.cores for rank in on))
        host = on[0].host
        if len(cores) < len(on):
            few.append(f"{host} ({len(on)} ranks, {plural(len(cores), 'core')})")
        elif sum(len(rank.cores) for rank in on) > len(cores):
            bound.append(host)
        elif any(rank.spread for rank in on):
            spread.append(host)
    found = []
    if few:
        found.append(
            f"ranks take turns on too few cores of {_named(few)}, so times are those of the "
            "operating system and not of the machine; start fewer ranks per node, or give the job "
            "more cores"
        )
    if bound:
        found.append(
            f"several ranks may run on one core of {_named(bound)}; bind each to cores of its own "
            "(mpirun --bind-to core, srun --cpu-bind=cores)"
        )
    if spread:
        found.append(
            f"a rank's cores lie in several NUMA domains of {_named(spread)}; bind each rank "
            "inside one (mpirun --map-by numa --bind-to numa, srun --cpu-bind=ldoms)"
        )
    return found


def _named(hosts: Sequence[str]) -> str:
    more = len(hosts) - HOSTS_NAMED
    return ", ".join(hosts[:HOSTS_NAMED]) + (
        f" and {plural(more, 'host')} more" if more > 0 else ""
    )
