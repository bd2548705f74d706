"""Sums buckets over the ranks.

`LevelSums` sums in each node's shared memory and then between nodes. `CollectiveSums` calls a
collective of MPI or Horovod. The sum of a bucket is a coroutine (see `collectives.coroutines`), so
the sums of several buckets can be under way at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from hpc_train.collectives import Collectives
from hpc_train.collectives.coroutines import Coroutine
from hpc_train.collectives.node import NodeMemory, aligned, own_pages, sum_into
from hpc_train.collectives.ring import Cross
from hpc_train.collectives.streams import stream_now
from hpc_train.errors import SetupError
from hpc_train.gradients.buckets import Bucket, Slab
from hpc_train.gradients.compression import Compressor
from hpc_train.gradients.division import BucketParts, Reach
from hpc_train.gradients.profile import Profile
from hpc_train.mpi.levels import Levels

# A rank signals these to its node, for each bucket: its buffer is filled; its share of the node's
# buffers is added up; its part is summed over the nodes; it has written its part of the result.
FILLED, ADDED, CROSSED, DONE = range(4)
SIGNALS_PER_BUCKET = 4


class Sums(Protocol):
    """Sums buckets over the ranks of a group.

    Attributes:
        profile: time and bytes that the sums have taken.
    """

    profile: Profile

    @property
    def flats(self) -> Sequence[Tensor]:
        """Each bucket's buffer: it is filled before `begin` and has the sum afterwards."""

    @property
    def early(self) -> bool:
        """Whether sums make progress during the backward pass; if not, they begin after it."""

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket. All ranks must begin the same buckets in the same order."""

    def close(self) -> None:
        """Release the buffers. Collective."""


class LevelSums:
    """Implements `Sums` in the shared memory of each node and by messages between nodes.

    Every bucket is cut into one part for each rank of a node. Each rank adds up its part of all the
    node's buffers, sums the result with the ranks of other nodes that have the same part, and
    writes it to all buffers of its node. With p ranks on each node this takes 1 / p of the traffic
    of ranks that each communicate for themselves. If nodes have different numbers of ranks, as many
    ranks of each node communicate as the smallest node has. The work within a node is still shared
    by all of its ranks.

    Collective to make.

    Args:
        levels: the ranks by nodes.
        buckets: all on the CPU.
        cross: the ranks of different nodes that have this rank's part, closed with this object.
            None on one node, and for ranks that own no part.
        compressor: compresses messages between nodes; None for exact sums.
        reach: for each bucket, where its result is needed; by default on every rank.

    Attributes:
        filling: is called when the sum of a bucket begins. It returns a function that tells whether
            this rank's buffer is filled. None: it is.

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
        reach: Sequence[Reach] = (),
    ) -> None:
        self.levels, self.buckets, self.cross = levels, buckets, cross
        self.compressor = compressor
        self.filling: Callable[[], Callable[[], bool]] | None = None
        self.division = BucketParts(levels, buckets, reach or [Reach.RANK] * len(buckets))
        self.profile = Profile()
        traffic = levels.whole.waiting.traffic
        self._inside = traffic.of("gradient sums", "inside")
        self._across = traffic.of("gradient sums", "across")
        self._gathered = traffic.of("parameter gathers", "across")
        self._other_bytes = 0  # that `cross` has sent and that are counted, or are not of sums
        self.rounds = [0] * len(buckets)
        self.memory: NodeMemory | None = None
        begins = self._begins()
        if levels.node.size > 1:
            try:
                self.memory = NodeMemory(
                    levels.node, begins[-1], signals=SIGNALS_PER_BUCKET * len(buckets)
                )
            except SetupError:
                if cross is not None:
                    cross.close()
                raise
            parts = [cut_memory(part, buckets, begins) for part in self.memory.parts]
        else:
            parts = [cut_memory(own_pages(begins[-1]), buckets, begins)]
        self._buffers = list(zip(*parts, strict=True))  # by bucket, then by rank of the node
        self.flats = parts[levels.node.rank]
        """This rank's buffer of each bucket (see `Sums`)."""
        self._begun = self._passed = 0
        self._everyone = range(levels.node.size)
        self._owners = range(levels.owners)
        self._shares: list[list[int]] | None = None
        """Cuts of each bucket for all ranks of the node, if it has more ranks than other nodes."""
        if levels.node.size > levels.owners and levels.nodes > 1:
            self._shares = [bucket.cuts(levels.node.size) for bucket in buckets]

    def _begins(self) -> list[int]:
        """Offsets of the buckets in this rank's memory, in bytes, and its size."""
        return bucket_begins(self.buckets)

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket (see `Sums`)."""
        begin = time.perf_counter()
        self.rounds[number] += 1
        round_, turn = self.rounds[number], self._begun
        self._begun += 1
        if self.filling is not None:
            yield self.filling()
        yield from self._all(number, FILLED, round_, self._everyone)
        if self._shares is not None:
            self._add_share(number, self._shares[number])
            yield from self._all(number, ADDED, round_, self._everyone)
        # A later bucket may be seen to be filled before an earlier one. Yet all nodes must begin
        # operations between nodes in the same order, because MPI pairs collectives by it.
        yield lambda: self._passed == turn
        self._passed += 1
        filled = time.perf_counter()
        if self.levels.owns:
            yield from self._sum_part(number)
        last = self._owners
        if self._shares is not None and self.division.reach[number] is Reach.RANK:
            yield from self._all(number, CROSSED, round_, self._owners)
            self._copy_share(number, self._shares[number])
            last = self._everyone
        yield from self._all(number, DONE, round_, last)
        end, note = time.perf_counter(), self.levels.whole.waiting.phases.note
        note("bucket", "bucket %d waits for other ranks", begin, filled, number)
        note("bucket", "sum of bucket %d", filled, end, number)
        self.profile.add(filled - begin, end - filled, self.flats[number].nbytes)

    def _all(self, number: int, phase: int, round_: int, ranks: range) -> Coroutine[None]:
        """Tell the node that this rank has come to a phase of a bucket, and wait for `ranks`."""
        if self.memory is not None:
            self.memory.tell(SIGNALS_PER_BUCKET * number + phase, round_)
            yield from self.memory.wait(SIGNALS_PER_BUCKET * number + phase, round_, ranks)

    def _owned(self, number: int, shares: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Divide this rank's share of a bucket by the owners of its parts.

        Yields:
            The owner's rank in the node, and the start and end of the share's part that it owns.
        """
        place = self.levels.node.rank
        for owner, (begin, end) in enumerate(pairwise(self.division.cuts[number])):
            first, last = max(begin, shares[place]), min(end, shares[place + 1])
            if first < last:
                yield owner, first, last

    def _add_share(self, number: int, shares: Sequence[int]) -> None:
        """Add up this rank's share of the node's buffers, into the buffers of the owners."""
        for owner, begin, end in self._owned(number, shares):
            parts = [buffer[begin:end] for buffer in self._buffers[number]]
            self._add(parts, [parts[owner]])

    def _copy_share(self, number: int, shares: Sequence[int]) -> None:
        """Copy this rank's share of the result from the owners' buffers to all others."""
        for owner, begin, end in self._owned(number, shares):
            parts = [buffer[begin:end] for buffer in self._buffers[number]]
            for part in parts:
                if part is not parts[owner]:
                    part.copy_(parts[owner])

    def _sum_part(self, number: int) -> Coroutine[None]:
        """Sum this rank's part: within the node, over the nodes, then into the node's buffers."""
        begin, end = self.division.part(number)
        parts = [buffer[begin:end] for buffer in self._buffers[number]]
        mine = parts[self.levels.node.rank]
        shared = self._shares is not None  # then `_add_share` has summed, and `_copy_share` copies
        everywhere = self.division.reach[number] is Reach.RANK
        others = [part for part in parts if part is not mine] if everywhere else []
        if self.cross is None:
            if len(parts) > 1:
                self._add(parts, [mine, *others])
            return
        if len(parts) > 1 and not shared:
            self._add(parts, [mine])
        yield from self._sum_across(number, mine)
        for other in [] if shared else others:
            other.copy_(mine)

    def _add(self, parts: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Sum parts of the node's buffers, and count them."""
        with self._inside:
            sum_into(parts, targets)
        self._inside.nbytes += sum(part.nbytes for part in parts)

    def gather(self, flat: Tensor, cuts: Sequence[int], tag: int) -> Coroutine[None]:
        """Gather a tensor's parts from other nodes by `Cross.all_gather_`, and count them."""
        assert self.cross is not None
        with self._gathered:
            yield from self.cross.all_gather_(flat, cuts, tag)
        sent = flat.nbytes * (self.cross.group.size - 1) // self.cross.group.size
        self._gathered.nbytes += sent
        self._other_bytes += sent

    def _sum_across(self, number: int, mine: Tensor) -> Coroutine[None]:
        with self._across:
            yield from self._summed_across(number, mine)
        assert self.cross is not None
        self.profile.sent = self.cross.bytes_sent
        self._across.nbytes += self.cross.bytes_sent - self._other_bytes
        self._other_bytes = self.cross.bytes_sent

    def _summed_across(self, number: int, mine: Tensor) -> Coroutine[None]:
        assert self.cross is not None
        if self.division.reach[number] is Reach.JOB:
            yield from self.cross.reduce_scatter_(mine, self.division.chunks(number), number)
        elif self.compressor is None:
            yield from self.cross.sum_(mine, number)
        else:
            slabs = self.buckets[number].slabs(*self.division.part(number))
            pieces = [slab.of(self.flats[number]) for slab in slabs]
            yield from self.compressor.sum_(self.cross, number, mine, pieces)

    def result(self, number: int, slab: Slab) -> Tensor:
        """A view of the result of a bucket, for a slab of what this rank owns of it."""
        return slab.of(self.flats[number])

    def close(self) -> None:
        """Release shared memory. Collective."""
        self.flats, self._buffers = [], []
        if self.memory is not None:
            self.memory.close()
        if self.cross is not None:
            self.cross.close()


class CollectiveSums:
    """Implements `Sums` by one collective per bucket, for GPUs and for lack of shared memory.

    Args:
        collectives: connect the ranks.
        buckets: on any device.
        early: whether the collectives make progress by themselves, by a thread or by Horovod.
    """

    def __init__(
        self, collectives: Collectives, buckets: Sequence[Bucket], *, early: bool = False
    ) -> None:
        self.collectives, self.early = collectives, early
        self.flats = _private(buckets)
        self.profile = Profile()

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket (see `Sums`), after the work that the caller's stream has by now."""
        stream = stream_now(self.flats[number])
        return self._sum(number, stream and stream.record_event())

    def _sum(self, number: int, filled: Any) -> Coroutine[None]:
        begin = time.perf_counter()
        if filled is not None:  # a thread may run this, which has another stream
            stream_now(self.flats[number]).wait_event(filled)
        pending = self.collectives.start_sum_(self.flats[number])
        if self.early:  # let the backward pass go on until the sum is done
            yield pending.done
        pending.wait()
        end = time.perf_counter()
        note = self.collectives.group.waiting.phases.note
        note("bucket", "sum of bucket %d", begin, end, number)
        self.profile.add(0.0, end - begin, self.flats[number].nbytes)

    def close(self) -> None:
        """Do nothing: no memory is shared."""


def _private(buckets: Sequence[Bucket]) -> list[Tensor]:
    return [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in buckets]


def bucket_begins(buckets: Sequence[Bucket | Tensor]) -> list[int]:
    """Aligned offsets of buckets one behind the other in memory, in bytes, and its size."""
    begins = [0]
    for bucket in buckets:
        begins.append(begins[-1] + aligned(bucket.nbytes))
    return begins


def cut_memory(
    part: Tensor, buckets: Sequence[Bucket | Tensor], begins: Sequence[int]
) -> list[Tensor]:
    """Cut memory, (bytes,) of uint8, into the buffers of buckets that begin at these offsets."""
    pairs = zip(buckets, begins, strict=False)
    return [part[begin : begin + b.nbytes].view(b.dtype) for b, begin in pairs]
