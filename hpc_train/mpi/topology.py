"""Finds out which ranks share a node, and which of these share a socket."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.files import system_text
from hpc_train.host.numa import SYSTEM, read_numa
from hpc_train.mpi.group import Group


@dataclass(frozen=True)
class Topology:
    """The nodes and sockets on which the ranks of a job run.

    Args:
        hosts: host name of each node; nodes are numbered by their lowest rank.
        node: for each rank of the job, the number of its node.
        socket: for each rank, the number (see `socket_of`) of the NUMA domain or socket that has
            all its cores; -1 if none has.
    """

    hosts: tuple[str, ...]
    node: tuple[int, ...]
    socket: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[tuple[int, str, int]]) -> Topology:
        """Make a topology.

        Args:
            ranks: for each rank, the lowest rank of its node, its host name and its socket.
        """
        hosts = {first: host for first, host, _ in sorted(ranks, reverse=True)}
        number = {first: index for index, first in enumerate(sorted(hosts))}
        return cls(
            tuple(hosts[first] for first in number),
            tuple(number[first] for first, _, _ in ranks),
            tuple(socket for _, _, socket in ranks),
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.node)

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        """Number of ranks of each node."""
        count = Counter(self.node)
        return tuple(count[node] for node in range(len(self.hosts)))

    def ranks_of(self, node: int) -> list[int]:
        """The ranks of a node, ascending."""
        return [rank for rank, its_node in enumerate(self.node) if its_node == node]


def discover(world: Group, node: Group) -> Topology:
    """Find out where all ranks are. Collective: a broadcast in each node and an Allgather.

    Args:
        world: all ranks of the job.
        node: the ranks that share memory with this one (MPI_Comm_split_type). They define a node,
            because host names need not be unique.
    """
    first = node.from_first(lambda: world.rank)
    mine = (first, world.host, socket_of(os.sched_getaffinity(0)))
    with world.waiting("the topology of the job"):
        return Topology.of(world.gathered(mine))


@dataclass(frozen=True)
class NodeHardware:
    """Numbers of a node's sockets, NUMA domains, and cores, each without its hardware threads."""

    sockets: int
    numa: int
    cores: int


def machine(root: Path = SYSTEM) -> NodeHardware:
    """The hardware of this node; a number is 0 if the operating system does not tell it."""
    cpus = [path / "topology" for path in root.glob("cpu/cpu[0-9]*")]
    sockets = {system_text(cpu / "physical_package_id") for cpu in cpus} - {""}
    cores = {system_text(cpu / "thread_siblings_list") for cpu in cpus} - {""}
    return NodeHardware(len(sockets), len(read_numa(root).cpus), len(cores))


def socket_of(cores: Iterable[int], root: Path = SYSTEM) -> int:
    """The number of the NUMA domain or socket that has all these cores.

    If one NUMA domain has all of them, it is the domain's number. If one socket has, it is the
    socket's number plus the number of domains. Otherwise, or if the operating system does not tell,
    it is -1.

    Args:
        cores: as the operating system numbers them.
        root: takes the place of /sys/devices/system.
    """
    mine, domains = set(cores), read_numa(root).cpus
    for number, domain in domains.items():
        if mine <= domain:
            return number
    cpus = (root / f"cpu/cpu{core}" for core in mine)
    sockets = {system_text(cpu / "topology/physical_package_id") for cpu in cpus}
    only = sockets.pop() if len(sockets) == 1 else ""
    return max(domains, default=-1) + 1 + int(only) if only.isdigit() else -1
