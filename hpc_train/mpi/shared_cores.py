"""Finds out whether ranks share cores, so that times say little about other machines."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hpc_train.errors import plural, some_of
from hpc_train.files import system_text
from hpc_train.host.cores import physical_cores
from hpc_train.mpi.group import Group

BOOT_ID = "/proc/sys/kernel/random/boot_id"
_SHOWN = 4  # number of hosts that are named


class RankCores(NamedTuple):
    """Where a rank runs.

    Args:
        boot: the boot id of the kernel; hosts with one boot id are one machine.
        host: the host name.
        cores: the physical cores that the rank may use.
    """

    boot: str
    host: str
    cores: frozenset[str]


def shared_cores(ranks: Sequence[RankCores]) -> str:
    """Why ranks of a job share cores; "" if they share none.

    Args:
        ranks: where each rank runs.
    """
    machines: dict[str, list[RankCores]] = defaultdict(list)
    for rank in ranks:
        machines[rank.boot or rank.host].append(rank)
    for several in machines.values():
        names = list(dict.fromkeys(rank.host for rank in several))
        if len(names) > 1:
            return f"hosts share cores: {some_of(names, _SHOWN)} are one machine"
        cores = len(frozenset().union(*(rank.cores for rank in several)))
        if len(several) > cores:
            few = plural(cores, "core")
            return f"ranks share cores: {names[0]} has {len(several)} ranks and {few}"
    return ""


def must_share(bound: Sequence[frozenset[int]]) -> bool:
    """Whether ranks of a node share hardware threads, as some set of threads has too few for them.

    Two threads of a core count as two, because a rank that yields one of them does not give up the
    other.

    Args:
        bound: the hardware threads that each rank may use.
    """
    return any(sum(its <= one for its in bound) > len(one) for one in set(bound))


def find_shared_cores(world: Group) -> str:
    """`shared_cores` of all ranks of a job. Collective."""
    mine = RankCores(
        system_text(BOOT_ID), world.host, frozenset(physical_cores(os.sched_getaffinity(0)))
    )
    return shared_cores(world.gathered(mine, "the cores of the ranks"))
