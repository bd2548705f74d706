"""The two levels of a group of ranks: those that share a node's memory, and the network between."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.mpi.group import Group


@dataclass(frozen=True)
class Levels:
    """A group of ranks by nodes, however they are numbered or dealt out.

    Args:
        whole: the group.
        node: its ranks on this node; `node.rank` is this rank's place there.
        cross: of each node, the rank with this one's place.
        owners: places that every node has. Each of them stands for its part of the data when nodes
            communicate; where nodes have more ranks than others, those ranks own nothing.
        nodes: how many there are.
    """

    whole: Group
    node: Group
    cross: Group
    owners: int
    nodes: int

    @classmethod
    def join(cls, whole: Group, node: Group, cross: Group) -> Levels:
        """Put a group and its parts together. Collective over the group."""
        return cls(whole, node, cross, whole.smallest(node.size), whole.largest(cross.size))

    @classmethod
    def of(cls, whole: Group) -> Levels:
        """Find out which ranks share memory. Collective."""
        if whole.comm is None:
            return cls.flat(whole)
        from mpi4py import MPI  # a group with a communicator has MPI

        with whole.waiting("which ranks share memory"):
            shared = whole.comm.Split_type(MPI.COMM_TYPE_SHARED, key=whole.rank)
            first = shared.bcast(whole.rank)
            shared.Free()
        node = whole.split(color=first, key=whole.rank)
        cross = whole.split(color=node.rank, key=whole.rank)
        return cls.join(whole, node, cross)

    @classmethod
    def flat(cls, whole: Group) -> Levels:
        """Every rank as if it were alone on its node."""
        return cls(whole, Group(waiting=whole.waiting), whole, 1, whole.size)

    def close(self) -> None:
        """Free what `of` has made. Collective."""
        for part in (self.node, self.cross):
            if part is not self.whole:
                part.close()

    @property
    def owns(self) -> bool:
        """Whether this rank stands for a part of the data."""
        return self.node.rank < self.owners
