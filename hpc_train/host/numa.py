"""NUMA nodes: which CPUs of a machine share a memory, and how far they are from the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_train.files import system_text

SYSTEM = Path("/sys/devices/system")  # Linux: Documentation/ABI/stable/sysfs-devices-node
LOCAL, REMOTE = 10, 20  # the distances that Linux assumes where the firmware tells none


@dataclass(frozen=True)
class NumaNodes:
    """The NUMA nodes of a machine, by their numbers.

    Args:
        cpus: the hardware threads of each node that has any; some nodes are only memory.
        distances: from each node to each node, as the firmware tells it; 10 is the node itself.
    """

    cpus: Mapping[int, set[int]]
    distances: Mapping[int, Mapping[int, int]]

    def reach(self, cpus: Iterable[int]) -> dict[int, int]:
        """The distance to each NUMA node from the nearest node that has one of these CPUs."""
        mine = set(cpus)
        own = [node for node, its in self.cpus.items() if its & mine]
        if not own:
            return {}
        return {to: min(self.distances[node][to] for node in own) for to in self.distances}

    def part(self, index: int, count: int) -> list[int]:
        """The CPUs of one of `count` equal parts of the machine, NUMA node by NUMA node."""
        cpus = [cpu for node in sorted(self.cpus) for cpu in sorted(self.cpus[node])]
        return cpus[index * len(cpus) // count : (index + 1) * len(cpus) // count]


def read_numa(root: Path = SYSTEM) -> NumaNodes:
    """The NUMA nodes of this machine; none where Linux does not tell them.

    Args:
        root: takes the place of /sys/devices/system.
    """
    folders = {int(path.name[4:]): path for path in root.glob("node/node[0-9]*")}
    cpus = {node: _numbers(system_text(folders[node] / "cpulist")) for node in sorted(folders)}
    distances = {}
    for node in cpus:
        told = [int(word) for word in system_text(folders[node] / "distance").split()]
        assumed = [LOCAL if other == node else REMOTE for other in cpus]
        # Linux lists the distances in the order of the nodes, which need not be 0, 1, 2.
        distances[node] = dict(zip(cpus, told if len(told) == len(cpus) else assumed, strict=True))
    return NumaNodes({node: its for node, its in cpus.items() if its}, distances)


def _numbers(text: str) -> set[int]:
    """Read the kernel's notation of a list, such as 0-3,8,10-11."""
    ends = [part.split("-") for part in text.split(",") if part]
    return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}
