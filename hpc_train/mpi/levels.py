"""The two levels of a group of ranks: within a node's memory, and over the network."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.mpi.group import Group


@dataclass(frozen=True)
class Levels:
    """A group of ranks by nodes. The ranks may be spread over the nodes in any way.

    Args:
        whole: the group.
        node: its ranks on this node; `node.rank` is this rank's place there.
        cross: the ranks of different nodes that have this rank's place.
        owners: size of the smallest node. The ranks at places below this own a part of the data
            each, for which they communicate with other nodes. Further ranks of larger nodes own
            none.
        nodes: number of nodes.
    """

    whole: Group
    node: Group
    cross: Group
    owners: int
    nodes: int

    @classmethod
    def join(cls, whole: Group, node: Group, cross: Group) -> Levels:
        """Make levels of a group and its parts. Collective over the group."""
        return cls(whole, node, cross, whole.smallest(node.size), whole.largest(cross.size))

    @classmethod
    def of(cls, whole: Group) -> Levels:
        """Find out which ranks share memory. Collective."""
        if whole.comm is None:
            return cls.flat(whole)
        from mpi4py import MPI  # it is running, because the group has a communicator

        with whole.waiting("the search for ranks that share memory"):
            shared = whole.comm.Split_type(MPI.COMM_TYPE_SHARED, key=whole.rank)
            first = shared.bcast(whole.rank)  # the lowest rank of the node, which stands for it
            shared.Free()
        node = whole.split(color=first, key=whole.rank)
        cross = whole.split(color=node.rank, key=whole.rank)
        return cls.join(whole, node, cross)

    @classmethod
    def flat(cls, whole: Group) -> Levels:
        """Treat every rank as if it were alone on its node."""
        return cls(whole, Group(waiting=whole.waiting), whole, 1, whole.size)

    def close(self) -> None:
        """Free the groups that `of` has made. Collective."""
        for part in (self.node, self.cross):
            if part is not self.whole:
                part.close()

    @property
    def owns(self) -> bool:
        """Whether this rank owns a part of the data."""
        return self.node.rank < self.owners
