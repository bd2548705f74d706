"""Which ranks share a node, and which of them a socket of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.mpi.group import Group

SYSTEM = Path("/sys/devices/system")  # Linux: Documentation/ABI/stable/sysfs-devices-system-cpu


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a job run, however its launcher has dealt them.

    Args:
        hosts: host name of each node; nodes are numbered by their lowest rank.
        node: for each rank of the job, the number of its node.
        socket: for each rank, the NUMA domain or socket of its node that has all its cores, as
            `socket_of` numbers them; -1 where there is no such one.
    """

    hosts: tuple[str, ...]
    node: tuple[int, ...]
    socket: tuple[int, ...]

    @classmethod
    def alone(cls) -> Topology:
        """The topology of one process; MPI is not touched."""
        return discover(Group(), Group())

    @classmethod
    def of(cls, ranks: Sequence[tuple[int, str, int]]) -> Topology:
        """From what each rank tells: the lowest rank of its node, its host name, its socket."""
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
        """For each node, how many ranks it has."""
        count = Counter(self.node)
        return tuple(count[node] for node in range(len(self.hosts)))

    def ranks_of(self, node: int) -> list[int]:
        """The ranks of a node, ascending."""
        return [rank for rank, its_node in enumerate(self.node) if its_node == node]


def discover(world: Group, node: Group) -> Topology:
    """Find out where all ranks are: one broadcast in the node, one Allgather. Collective.

    Args:
        world: all ranks of the job.
        node: those that share memory with this one (MPI_Comm_split_type); that they do makes a
            node, since host names need not be unique.
    """
    first = node.from_first(lambda: world.rank)
    mine = (first, world.host, socket_of(os.sched_getaffinity(0)))
    with world.waiting("the topology of the job"):
        return Topology.of(world.gathered(mine))


@dataclass(frozen=True)
class NodeHardware:
    """What a node has: sockets, NUMA domains, and cores (hardware threads of one count once)."""

    sockets: int
    numa: int
    cores: int


def machine(root: Path = SYSTEM) -> NodeHardware:
    """What this node has; 0 for what the operating system does not tell."""
    cpus = [path / "topology" for path in root.glob("cpu/cpu[0-9]*")]
    sockets = {_text(cpu / "physical_package_id") for cpu in cpus} - {""}
    cores = {_text(cpu / "thread_siblings_list") for cpu in cpus} - {""}
    return NodeHardware(len(sockets), len(_numa(root)), len(cores))


def socket_of(cores: Iterable[int], root: Path = SYSTEM) -> int:
    """The part of the node that these cores lie in.

    The number of a NUMA domain if all are in one; else, counted on from the domains, the number of
    a socket; else, or where the operating system does not tell, -1.

    Args:
        cores: as the operating system numbers them.
        root: stands for /sys/devices/system.
    """
    mine, domains = set(cores), _numa(root)
    for number, domain in domains.items():
        if mine <= domain:
            return number
    cpus = (root / f"cpu/cpu{core}" for core in mine)
    sockets = {_text(cpu / "topology/physical_package_id") for cpu in cpus}
    only = sockets.pop() if len(sockets) == 1 else ""
    return max(domains, default=-1) + 1 + int(only) if only.isdigit() else -1


def _numa(root: Path) -> dict[int, set[int]]:
    """The cores of each NUMA domain; some domains are memory only."""
    lists = {int(path.name[4:]): _text(path / "cpulist") for path in root.glob("node/node[0-9]*")}
    return {number: _cores(lists[number]) for number in sorted(lists) if lists[number]}


def _cores(text: str) -> set[int]:
    """The kernel's way to write a list: 0-3,8,10-11."""
    ends = [part.split("-") for part in text.split(",")]
    return {core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # no /sys in this container
        return ""
