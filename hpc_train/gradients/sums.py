"""How a bucket is summed over the ranks.

Through a node's shared memory and between nodes, or by the collectives of MPI or Horovod. The sum
of one bucket is a coroutine (see `collectives.steps`); those of several go on together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from hpc_train.collectives import Collectives
from hpc_train.collectives.coroutines import Coroutine
from hpc_train.collectives.node import MEMORY_ALIGNMENT, NodeMemory, sum_into
from hpc_train.collectives.ring import Cross
from hpc_train.errors import SetupError
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.compression import Compressor
from hpc_train.gradients.profile import Profile
from hpc_train.mpi.levels import Levels

FILLED, ADDED, CROSSED, DONE = range(4)
SIGNALS_PER_BUCKET = 4  # of each bucket


class Sums(Protocol):
    """Sums buckets over the ranks of a group.

    Attributes:
        profile: what it has taken.
    """

    profile: Profile

    @property
    def flats(self) -> Sequence[Tensor]:
        """Each bucket's buffer, to be filled before `begin` and to be read after it."""

    @property
    def early(self) -> bool:
        """Whether sums make progress beside the backward pass; if not, they begin after it."""

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket. All ranks begin the same ones in the same order."""

    def close(self) -> None:
        """Give the buffers back. Collective."""


class LevelSums:
    """Implements `Sums` in the memory of each node and, between nodes, by one rank for each part.

    The ranks of a node add up each other's buffers where they lie: each rank its part of them all.
    Only these parts, one of each node, cross the network; then each rank writes its part of the
    result to all buffers of its node. On a network of nodes with p ranks each this takes
    1 / p of the traffic of ranks that communicate as if they were alone. If nodes have different
    numbers of ranks, as many ranks of each node cross the network as the smallest node has. The
    work within a node is still shared by all of its ranks.

    Collective to make.

    Args:
        levels: the ranks by nodes.
        buckets: all on the CPU.
        cross: for the ranks of different nodes, closed with this; None on one node, and for ranks
            that own nothing.
        compressor: of what crosses nodes.
        whole: of each bucket, whether every rank gets the whole result; else each only its part
            (`Bucket.cuts`). By default the whole of all.

    Raises:
        SetupError: there is too little shared memory; raised on all ranks of the node.
    """

    early = True

    def __init__(
        self,
        levels: Levels,
        buckets: Sequence[Bucket],
        cross: Cross | None,
        compressor: Compressor | None = None,
        whole: Sequence[bool] = (),
    ) -> None:
        self.levels, self.buckets, self.cross = levels, buckets, cross
        self.compressor, self.whole = compressor, whole or [True] * len(buckets)
        self.profile = Profile()
        self.rounds = [0] * len(buckets)
        self.cuts = [bucket.cuts(levels.owners) for bucket in buckets]
        self.memory: NodeMemory | None = None
        if levels.node.size > 1:
            nbytes = memory_bytes(buckets)
            try:
                self.memory = NodeMemory(
                    levels.node, nbytes, signals=SIGNALS_PER_BUCKET * len(buckets)
                )
            except SetupError:
                if cross is not None:
                    cross.close()
                raise
            parts = [cut_memory(part, buckets) for part in self.memory.parts]
        else:
            parts = [_private(buckets)]
        self._buffers = list(zip(*parts, strict=True))  # of each bucket, those of the node's ranks
        self.flats = parts[levels.node.rank]
        """See `Sums`."""
        self._begun = self._passed = 0
        self._everyone = range(levels.node.size)
        self._owners = range(levels.owners)
        self._shares: list[list[int]] | None = None
        """Where each bucket is cut for all ranks of a node that has more of them than others."""
        if levels.node.size > levels.owners and levels.nodes > 1:
            self._shares = [bucket.cuts(levels.node.size) for bucket in buckets]

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket."""
        begin = time.perf_counter()
        self.rounds[number] += 1
        round_, turn = self.rounds[number], self._begun
        self._begun += 1
        yield from self._all(number, FILLED, round_, self._everyone)
        if self._shares is not None:
            self._add_share(number, self._shares[number])
            yield from self._all(number, ADDED, round_, self._everyone)
        # A later bucket may be seen to be filled before an earlier one. Yet all nodes have to come
        # to what crosses them in one order: MPI pairs collectives by it.
        yield lambda: self._passed == turn
        self._passed += 1
        filled = time.perf_counter()
        if self.levels.owns:
            yield from self._sum_part(number)
        last = self._owners
        if self._shares is not None and self.whole[number]:
            yield from self._all(number, CROSSED, round_, self._owners)
            self._copy_share(number, self._shares[number])
            last = self._everyone
        yield from self._all(number, DONE, round_, last)
        nbytes = self.flats[number].nbytes
        self.profile.add(filled - begin, time.perf_counter() - filled, nbytes)

    def _all(self, number: int, phase: int, round_: int, ranks: range) -> Coroutine[None]:
        """Tell the node that this rank has come to a phase of a bucket, and wait for some ranks."""
        if self.memory is not None:
            self.memory.tell(SIGNALS_PER_BUCKET * number + phase, round_)
            yield from self.memory.wait(SIGNALS_PER_BUCKET * number + phase, round_, ranks)

    def _owned(self, number: int, shares: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """This rank's share of a bucket, by owners: the owner's place, its begin and its end."""
        place = self.levels.node.rank
        for owner, (begin, end) in enumerate(pairwise(self.cuts[number])):
            first, last = max(begin, shares[place]), min(end, shares[place + 1])
            if first < last:
                yield owner, first, last

    def _add_share(self, number: int, shares: Sequence[int]) -> None:
        """Add up a share of the node's buffers, into those of the ranks that take it across."""
        for owner, begin, end in self._owned(number, shares):
            parts = [buffer[begin:end] for buffer in self._buffers[number]]
            sum_into(parts, [parts[owner]])

    def _copy_share(self, number: int, shares: Sequence[int]) -> None:
        """Copy what came across from the ranks that took it to all others."""
        for owner, begin, end in self._owned(number, shares):
            parts = [buffer[begin:end] for buffer in self._buffers[number]]
            for part in parts:
                if part is not parts[owner]:
                    part.copy_(parts[owner])

    def part(self, number: int) -> tuple[int, int]:
        """Where this rank's part of a bucket begins and ends."""
        place = self.levels.node.rank
        cuts = self.cuts[number]
        return (cuts[place], cuts[place + 1]) if self.levels.owns else (0, 0)

    def _sum_part(self, number: int) -> Coroutine[None]:
        """This rank's part: of the node's buffers, over the nodes, into the node's buffers."""
        begin, end = self.part(number)
        parts = [buffer[begin:end] for buffer in self._buffers[number]]
        mine = parts[self.levels.node.rank]
        shared = self._shares is not None
        others = [part for part in parts if part is not mine] if self.whole[number] else []
        if self.cross is None:
            sum_into(parts, [mine, *others])
            return
        if len(parts) > 1 and not shared:
            sum_into(parts, [mine])
        yield from self._sum_across(number, mine)
        for other in [] if shared else others:
            other.copy_(mine)

    def _sum_across(self, number: int, mine: Tensor) -> Coroutine[None]:
        assert self.cross is not None
        if self.compressor is None:
            yield from self.cross.sum_(mine, number)
        else:
            slabs = self.buckets[number].slabs(*self.part(number))
            pieces = [slab.of(self.flats[number]) for slab in slabs]
            yield from self.compressor.sum_(self.cross, number, mine, pieces)
        self.profile.sent = self.cross.bytes_sent

    def close(self) -> None:
        """Give shared memory back."""
        self.flats, self._buffers = [], []
        if self.memory is not None:
            self.memory.close()
        if self.cross is not None:
            self.cross.close()


class CollectiveSums:
    """Implements `Sums` by one collective per bucket: on GPUs, and where no memory is shared.

    Args:
        collectives: of the ranks.
        buckets: on any device.
        early: whether the collectives make progress by themselves (a thread, Horovod).
    """

    def __init__(
        self, collectives: Collectives, buckets: Sequence[Bucket], *, early: bool = False
    ) -> None:
        self.collectives, self.early = collectives, early
        self.flats = _private(buckets)
        self.profile = Profile()

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket; what was begun early is waited for only when the backward pass is over."""
        begin = time.perf_counter()
        pending = self.collectives.start_sum_(self.flats[number])
        if self.early:
            yield pending.done
        pending.wait()
        nbytes = self.flats[number].nbytes
        self.profile.add(0.0, time.perf_counter() - begin, nbytes)

    def close(self) -> None:
        """Nothing is shared."""


def _private(buckets: Sequence[Bucket]) -> list[Tensor]:
    return [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in buckets]


def _begins(buckets: Sequence[Bucket]) -> list[int]:
    """Where each bucket begins in memory that has them all, in bytes, aligned; at last the size."""
    begins = [0]
    for bucket in buckets:
        begins.append(begins[-1] + -(-bucket.nbytes // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT)
    return begins


def memory_bytes(buckets: Sequence[Bucket]) -> int:
    """What `cut_memory` needs."""
    return _begins(buckets)[-1]


def cut_memory(part: Tensor, buckets: Sequence[Bucket]) -> list[Tensor]:
    """Memory, (bytes,) of uint8, as the buffers of all buckets."""
    begins = _begins(buckets)
    pairs = zip(buckets, begins, strict=False)
    return [part[begin : begin + b.nbytes].view(b.dtype) for b, begin in pairs]
