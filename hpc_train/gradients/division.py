"""Which rank owns which part of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from hpc_train.gradients.buckets import Bucket
from hpc_train.mpi.levels import Levels


class Reach(Enum):
    """Where the result of a bucket's sum is needed."""

    RANK = "every rank has all of it"
    NODE = "the ranks of each node have all of it together"
    JOB = "the ranks of all nodes have all of it together"


class BucketParts:
    """Divides buckets over the ranks of a node, and for `Reach.JOB` further over the nodes.

    Every bucket is cut into one part for each owner of a node. With `Reach.JOB` each part is cut
    into one chunk for each node.

    Args:
        levels: the ranks by nodes.
        buckets: the buckets.
        reach: for each bucket, where its result is needed. On one node `JOB` is the same as `NODE`.

    Attributes:
        cuts: for each bucket, its cuts for the owners of a node.
        reach: as given, without `JOB` on one node.
    """

    def __init__(self, levels: Levels, buckets: Sequence[Bucket], reach: Sequence[Reach]) -> None:
        self.levels, self.buckets, self.reach = levels, list(buckets), list(reach)
        if levels.nodes == 1:
            self.reach = [Reach.NODE if each is Reach.JOB else each for each in self.reach]
        self._chunks = [
            bucket.cuts(levels.owners * (levels.nodes if each is Reach.JOB else 1))
            for bucket, each in zip(self.buckets, self.reach, strict=True)
        ]
        """Cuts of each bucket for all ranks that own a part of its result."""
        self.cuts = [chunks[:: (len(chunks) - 1) // levels.owners] for chunks in self._chunks]

    def part(self, number: int) -> tuple[int, int]:
        """Start and end of this rank's part of a bucket, in elements; (0, 0) if it owns none."""
        place = self.levels.node.rank
        cuts = self.cuts[number]
        return (cuts[place], cuts[place + 1]) if self.levels.owns else (0, 0)

    def chunks(self, number: int) -> list[int]:
        """Cuts of this rank's part for the ranks of all nodes that have this part, from 0 on."""
        begin, end = self.part(number)
        if self.reach[number] is not Reach.JOB:
            return [0, end - begin]
        first = self.levels.node.rank * self.levels.nodes
        return [cut - begin for cut in self._chunks[number][first : first + self.levels.nodes + 1]]

    def own(self, number: int) -> tuple[int, int]:
        """Start and end of what this rank has of a bucket's result, if it has not all of it."""
        begin, end = self.part(number)
        if self.reach[number] is not Reach.JOB or not self.levels.owns:
            return begin, end
        chunks, place = self.chunks(number), self.levels.cross.rank
        return begin + chunks[place], begin + chunks[place + 1]
