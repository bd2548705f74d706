"""Gives each rank a place in the layout dp x tp x pp: ranks that communicate most are nearest.

Tensor-parallel ranks exchange activations in every layer, pipeline stages once per micro-batch,
data-parallel ranks once per step. There is no communication here: every rank computes the same
placement from the same topology.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import ConfigError
from hpc_train.mpi.topology import Topology

Ranks = tuple[int, ...]
SOCKET, NODE, NODES = "socket", "node", "nodes"
SUGGESTIONS = 3  # layouts that an error message offers


@dataclass(frozen=True)
class Coordinate:
    """A rank's place: the numbers of its replica, its part of each layer, and its stage."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True, eq=False)
class Placement:
    """The ranks of a job in their layout.

    Args:
        topology: where the ranks run.
        ranks: world ranks, of shape (dp, pp, tp).
    """

    topology: Topology
    ranks: NDArray[np.int64]

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return int(self.ranks.shape[0])

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return int(self.ranks.shape[1])

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return int(self.ranks.shape[2])

    def coordinate(self, rank: int) -> Coordinate:
        """The place of a rank."""
        dp, pp, tp = np.argwhere(self.ranks == rank)[0].tolist()
        return Coordinate(dp, tp, pp)

    def groups(self) -> dict[str, list[Ranks]]:
        """All groups of each axis, each in the order of its ranks (see `ParallelGrid`)."""
        of_data = _rows(self.ranks.transpose(1, 2, 0))
        ends = [0, self.pp - 1] if self.pp > 1 else [0]
        by_node = [_by_node(group, self.topology.node) for group in of_data]
        return {
            "data": of_data,
            "tensor": _rows(self.ranks),
            "pipe": _rows(self.ranks.transpose(0, 2, 1)),
            "model": _rows(self.ranks.reshape(self.dp, -1)),
            "embedding": _rows(self.ranks[:, ends].transpose(0, 2, 1)),
            "data_node": list(chain(*by_node)),
            "data_cross": list(chain(*map(_across, by_node))),
        }

    def extent(self, group: Ranks) -> str:
        """The smallest unit that holds the whole group: "socket", "node", or several "nodes"."""
        node, socket = self.topology.node, self.topology.socket
        if len({node[rank] for rank in group}) > 1:
            return NODES
        sockets = {socket[rank] for rank in group}
        return SOCKET if len(sockets) == 1 and -1 not in sockets else NODE

    def crossing(self) -> list[Ranks]:
        """The tensor-parallel groups that lie across nodes."""
        return [group for group in _rows(self.ranks) if self.extent(group) == NODES]

    def warning(self) -> str:
        """A warning for the user if tensor-parallel groups lie across nodes; else ""."""
        crossing = len(self.crossing())
        if not crossing:
            return ""
        counts = sorted(set(self.topology.ranks_per_node))
        return (
            f"{crossing} of {self.dp * self.pp} tensor-parallel groups of {self.tp} ranks lie "
            "across nodes and will be slow: choose a parallel.tp that divides the ranks of each "
            f"node ({', '.join(map(str, counts))})"
        )


def place(topology: Topology, dp: int | None, tp: int, pp: int) -> Placement:
    """Place the ranks by where they run, not by their numbers.

    The ranks of a tensor-parallel group share a socket if possible, else a node. As few groups as
    possible lie across nodes. The stages of a replica are then taken from one socket if possible,
    else from one node, else from as few nodes as possible. Replicas are numbered by their lowest
    rank. Stages are numbered in the order of nodes, so that a pipeline passes from one node to the
    next only once. Tensor-parallel ranks ascend.

    Args:
        topology: where the ranks run.
        dp: data-parallel size; None for the number of ranks / (tp * pp).
        tp: tensor-parallel size.
        pp: pipeline-parallel size.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks; the error names sizes that
            fit.
    """
    dp = data_parallel(topology.size, dp, tp, pp)
    singles = [(rank,) for rank in range(topology.size)]
    tensor = [tuple(sorted(chain(*near))) for near in bundle(singles, tp, topology)]
    replicas = [tuple(chain(*near)) for near in bundle(tensor, pp, topology)]
    return Placement(topology, np.array(sorted(replicas, key=min)).reshape(dp, pp, tp))


def bundle(items: Sequence[Ranks], size: int, topology: Topology) -> list[list[Ranks]]:
    """Bundle items, `size` at a time: first inside sockets, then inside nodes, then across nodes.

    An item of several ranks is in a socket or node if all its ranks are. Items in a bundle are
    sorted by node, socket and lowest rank.
    """
    sockets = [
        None if socket < 0 else (node, socket)
        for node, socket in zip(topology.node, topology.socket, strict=True)
    ]
    made: list[list[Ranks]] = []
    left = list(items)
    for homes in (sockets, topology.node, [0] * topology.size):
        left.sort(key=lambda item: (topology.node[item[0]], topology.socket[item[0]], item[0]))
        near: dict[Hashable, list[Ranks]] = {}
        for item in left:
            near.setdefault(_home(item, homes), []).append(item)
        left = near.pop(None, [])  # items that lie across these homes, for the next larger ones
        for members in near.values():
            whole = len(members) - len(members) % size
            made += [members[i : i + size] for i in range(0, whole, size)]
            left += members[whole:]
    return made


def _home(item: Ranks, homes: Sequence[Hashable]) -> Hashable:
    """The socket or node that all ranks of an item have; None if they differ."""
    first = homes[item[0]]
    return first if all(homes[rank] == first for rank in item[1:]) else None


def _rows(ranks: NDArray[np.int64]) -> list[Ranks]:
    """The groups along the last axis."""
    return [tuple(row) for row in ranks.reshape(-1, ranks.shape[-1]).tolist()]


def _by_node(group: Ranks, node: Sequence[int]) -> list[Ranks]:
    """A group's parts on each node."""
    parts: dict[int, list[int]] = {}
    for rank in group:
        parts.setdefault(node[rank], []).append(rank)
    return [tuple(part) for part in parts.values()]


def _across(parts: Sequence[Ranks]) -> list[Ranks]:
    """The ranks that have the same position in their part, in the order of the parts."""
    positions = range(max(map(len, parts)))
    return [tuple(part[i] for part in parts if i < len(part)) for i in positions]


def data_parallel(world: int, dp: int | None, tp: int, pp: int) -> int:
    """Check the sizes of a layout; returns the data-parallel size.

    Args:
        world: number of ranks of the job.
        dp: the requested data-parallel size; None for world / (tp * pp).
        tp: tensor-parallel size.
        pp: pipeline-parallel size.

    Raises:
        ConfigError: a size is no whole number from 1 on, or the product of the sizes is not the
            number of ranks.
    """
    for name, size in (("dp", dp), ("tp", tp), ("pp", pp)):
        if size is not None and not (isinstance(size, Integral) and size >= 1):
            raise ConfigError(f"parallel.{name} is {size!r}", "give a whole number, 1 or more")
    if dp is None and world % (tp * pp) == 0:
        return world // (tp * pp)
    if dp is not None and dp * tp * pp == world:
        return dp
    near = f"nearest that fit: {', or '.join(_nearest(world, dp, tp, pp))}"
    if dp is None:
        raise ConfigError(
            f"parallel: tp {tp} x pp {pp} is {tp * pp}, which does not divide the job's "
            f"{world} {_ranks(world)}",
            near,
        )
    raise ConfigError(
        f"parallel: dp {dp} x tp {tp} x pp {pp} is {dp * tp * pp}, the job has {world} "
        f"{_ranks(world)}",
        near,
    )


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _nearest(world: int, dp: int | None, tp: int, pp: int) -> list[str]:
    """The layouts of `world` ranks whose sizes differ from these by the smallest factors."""

    def distance(layout: tuple[int, int, int]) -> float:
        wanted = (layout[0] if dp is None else dp, tp, pp)
        return sum(abs(math.log(has / asked)) for has, asked in zip(layout, wanted, strict=True))

    divisors = [size for size in range(1, world + 1) if world % size == 0]
    layouts = [(world // (t * p), t, p) for t in divisors for p in divisors if world % (t * p) == 0]
    nearest = sorted(layouts, key=lambda layout: (distance(layout), layout))[:SUGGESTIONS]
    return ["dp {} x tp {} x pp {}".format(*layout) for layout in nearest]
