"""The devices that ranks compute on: GPUs that ranks share, GPUs that idle, and GPUs far away."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hpc_train.collectives.device import gpu_uuid
from hpc_train.errors import plural
from hpc_train.host.numa import LOCAL, read_numa
from hpc_train.mpi.gpus import Gpus
from hpc_train.mpi.nearest import nearest
from hpc_train.mpi.runtime import Runtime

HOSTS_SHOWN = 4  # number of hosts that are named


class RankDevice(NamedTuple):
    """The device of a rank.

    Args:
        rank: world rank.
        host: its host.
        kind: cpu, cuda or xpu.
        name: what tells this device from others of its host; "" if nothing does.
        gpus: the GPUs that the rank was given one of.
        numa: the NUMA node that its GPU hangs on; -1 if it is not known.
        reach: the distances of its cores to the NUMA nodes.
    """

    rank: int
    host: str
    kind: str
    name: str
    gpus: Gpus
    numa: int
    reach: Mapping[int, int]


def used_devices(runtime: Runtime, device: torch.device) -> tuple[str, bool]:
    """The devices that ranks compute on, and whether all is well with them. Collective.

    Args:
        runtime: the job's runtime.
        device: the device that this rank computes on.
    """
    world = runtime.world
    mine = RankDevice(
        world.rank,
        world.host,
        device.type,
        gpu_uuid(device),
        runtime.gpus,
        runtime.gpu_numa,
        read_numa().reach(os.sched_getaffinity(0)),
    )
    return judged_devices(world.gathered(mine, "the devices of all ranks"))


def judged_devices(ranks: Sequence[RankDevice]) -> tuple[str, bool]:
    """What to say of all ranks' devices, and whether all is well.

    If it is not, the text names the hosts where GPUs are shared, idle, or farther away than needed.
    """
    hosts: dict[str, list[RankDevice]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    wrong = [
        f"on {host} {text}"
        for host, on in hosts.items()
        if (text := ", ".join(filter(None, [_shared_or_idle(on), _far(on)])))
    ]
    if wrong:
        left = len(wrong) - HOSTS_SHOWN
        more = [f"and {plural(left, 'host')} more"] if left > 0 else []
        return "; ".join([*wrong[:HOSTS_SHOWN], *more]), False
    computing = [rank for rank in ranks if rank.kind != "cpu"]
    vendors = {rank.gpus.vendor.name for rank in computing if rank.gpus.count}
    kind = f"{vendors.pop()} GPUs" if len(vendors) == 1 else "GPUs"
    number = f"{len(computing)} {kind}{_nearness(computing)}" if computing else ""
    processors = "processors" if len(computing) < len(ranks) else ""
    return " and ".join(filter(None, [number, processors])), True


def _nearness(ranks: Sequence[RankDevice]) -> str:
    """How many GPUs are on NUMA nodes of their ranks' cores; "" if that is not known."""
    if not all(rank.numa in rank.reach for rank in ranks):
        return ""
    near = sum(rank.reach[rank.numa] == LOCAL for rank in ranks)
    if near == len(ranks):
        return ", each on a NUMA node of its rank's cores"
    return f", {near} of them on NUMA nodes of their ranks' cores, and no order is nearer"


def _shared_or_idle(ranks: Sequence[RankDevice]) -> str:
    """Which of a host's GPUs ranks share, and how many idle; "" if none does."""
    users: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.kind != "cpu":
            users.setdefault(rank.name or f"rank {rank.rank}", []).append(rank.rank)
    found = [f"ranks {_listed(on)} share a GPU" for on in users.values() if len(on) > 1]
    gpus = max((rank.gpus for rank in ranks), key=lambda gpus: gpus.count)
    idle, maker = gpus.count - len(users), gpus.vendor
    if idle > 0 and users:
        found.append(
            f"{idle} of {gpus.count} {maker.name} GPUs are idle: start a rank for each GPU"
        )
    elif idle > 0:
        found.append(
            f"{idle} {maker.name} GPUs are idle, because torch finds none: install torch for "
            f"{maker.build}, or set {maker.variables[0]} to nothing to compute on processors"
        )
    return ", ".join(found)


def _far(ranks: Sequence[RankDevice]) -> str:
    """Which of a host's ranks are farther from their GPUs than they could be; "" if none is.

    They could be nearer if ranks of the host exchanged their GPUs.
    """
    known = [rank for rank in ranks if rank.kind != "cpu" and rank.numa in rank.reach]
    if not known:
        return ""
    distances = [[rank.reach[other.numa] for other in known] for rank in known]
    best = [row[gpu] for row, gpu in zip(distances, nearest(distances), strict=True)]
    now = [row[place] for place, row in enumerate(distances)]
    if sum(best) == sum(now):
        return ""
    far = [rank.rank for rank, old, new in zip(known, now, best, strict=True) if new < old]
    variable = known[0].gpus.vendor.variables[0]
    return (
        f"rank{'s' * (len(far) > 1)} {_listed(far)} would be nearer to GPUs of other ranks: list "
        f"the GPUs in {variable} in the order of the ranks, or bind the ranks to cores in the "
        "order of the GPUs"
    )


def _listed(numbers: Sequence[int]) -> str:
    """Numbers in words: 0, 1 and 2."""
    words = [str(number) for number in numbers]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
