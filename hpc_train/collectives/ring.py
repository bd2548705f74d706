"""Sums over ranks of different nodes: a pipelined ring for slow links, or MPI's own sums.

A ring is bandwidth-optimal: each of n ranks sends 2 (n - 1) / n of the data, and only to one
neighbour, so no link is overloaded (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", JPDC 69, 2009). Here the data go round in segments that do not wait
for each other: while one is added up, others are on the wire.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.mpi.group import Group

# Bytes of a message. Large ones cost less processor time, but several segments must be on the wire.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 15, 1 << 17
PIPELINED = 4  # segments of an operation, unless messages would be too small or too large
SEGMENTS = 16  # of one operation at most; each has its own tag
SEGMENTS_AHEAD = 2  # receives of a segment that are posted before they are waited for

T = TypeVar("T")


class Cross(Protocol):
    """Operations over ranks of different nodes, one rank of each node. Each method is collective.

    All ranks must start the same operations. Those under way at the same time need different tags.

    Attributes:
        group: the ranks.
        bytes_sent: bytes that this rank has sent so far.
    """

    group: Group
    bytes_sent: int

    def sum_(self, flat: Tensor, tag: int) -> Coroutine[None]:
        """Replace a contiguous float32 or float64 tensor of one dimension by its sum."""

    def sum_16_(
        self, flat: Tensor, dtype: torch.dtype, residual: Tensor, tag: int
    ) -> Coroutine[None]:
        """Do `sum_` with 16-bit numbers on the wire.

        A rank that rounds adds its rounding error to its `residual`, which has the shape and dtype
        of `flat`.
        """

    def reduce_scatter_(self, flat: Tensor, cuts: Sequence[int], tag: int) -> Coroutine[None]:
        """Do the first half of `sum_`: this rank's part gets its sum, the others are overwritten.

        Args:
            flat: as for `sum_`.
            cuts: n + 1 ascending positions; rank r has the part from cuts[r] to cuts[r + 1].
            tag: the operation's number.
        """

    def all_gather_(self, flat: Tensor, cuts: Sequence[int], tag: int) -> Coroutine[None]:
        """Give all ranks all parts of a contiguous tensor of one dimension, of any dtype.

        Args:
            flat: this rank has filled its own part; the others are overwritten.
            cuts: as for `reduce_scatter_`.
            tag: the operation's number.
        """

    def gather(self, payload: Tensor, tag: int) -> Coroutine[Tensor]:
        """The ranks' payloads, (n, *shape), in the order of ranks; any dtype."""

    def largest(self, number: float) -> Coroutine[float]:
        """The largest of the ranks' numbers, none of them NaN.

        It has no tag, so all ranks must start these operations in the same order.
        """

    def close(self) -> None:
        """Release communicators. Collective."""


class Ring:
    """Implements `Cross` by messages to the next rank. Collective to make.

    Args:
        group: one rank of each node.
    """

    def __init__(self, group: Group) -> None:
        from mpi4py import MPI  # here, so that a process alone can import this module without MPI

        assert group.comm is not None
        self.group = group
        self.comm = group.comm.Dup()  # so that nobody else uses these tags
        self.slots = ((MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1) // SEGMENTS
        """Operations that can be under way at once: 2048 by the MPI standard, usually more."""
        self._started: Counter[int] = Counter()  # operations, by slot
        self._ended: Counter[int] = Counter()
        self.next = (group.rank + 1) % group.size
        self.previous = (group.rank - 1) % group.size
        self.bytes_sent = 0

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()

    def sum_(self, flat: Tensor, tag: int) -> Coroutine[None]:
        """Replace a contiguous tensor by its sum over the ranks. Collective."""

        def segments(first: int) -> Coroutine[None]:
            several = _segments(flat, self.group.size)
            yield [self._sum(segment, first + number) for number, segment in enumerate(several)]

        return self._in_turn(tag, segments)

    def sum_16_(
        self, flat: Tensor, dtype: torch.dtype, residual: Tensor, tag: int
    ) -> Coroutine[None]:
        """Replace a contiguous tensor by its sum, with 16-bit messages (see `Cross`)."""

        def segments(first: int) -> Coroutine[None]:
            several = _segments(flat, self.group.size)
            losses = residual.split([len(segment) for segment in several])
            yield [
                self._sum_16(segment, dtype, lost, first + number)
                for number, (segment, lost) in enumerate(zip(several, losses, strict=True))
            ]

        return self._in_turn(tag, segments)

    def reduce_scatter_(self, flat: Tensor, cuts: Sequence[int], tag: int) -> Coroutine[None]:
        """Give this rank's part of a tensor its sum (see `Cross`). Collective."""

        def segments(first: int) -> Coroutine[None]:
            yield [
                self._reduce(chunks, flat.dtype, first + number)
                for number, chunks in enumerate(_cut_segments(flat, cuts))
            ]

        return self._in_turn(tag, segments)

    def all_gather_(self, flat: Tensor, cuts: Sequence[int], tag: int) -> Coroutine[None]:
        """Give all ranks all parts of a tensor (see `Cross`). Collective."""

        def segments(first: int) -> Coroutine[None]:
            yield [
                self._pass_round(chunks, self.group.rank, first + number)
                for number, chunks in enumerate(_cut_segments(flat, cuts))
            ]

        return self._in_turn(tag, segments)

    def gather(self, payload: Tensor, tag: int) -> Coroutine[Tensor]:
        """The payloads of all ranks (see `Cross`); each goes round the ring."""

        def passed(first: int) -> Coroutine[Tensor]:
            whole = payload.new_empty((self.group.size, *payload.shape))
            whole[self.group.rank] = payload
            yield from self._pass_round(list(whole), self.group.rank, first)
            return whole

        return self._in_turn(tag, passed)

    def largest(self, number: float) -> Coroutine[float]:
        """The largest of the ranks' numbers (see `Cross`)."""
        from mpi4py import MPI

        # For one number MPI's own messages cost less than a ring's.
        result = array("d", [number])
        yield self.comm.Iallreduce(MPI.IN_PLACE, result, op=MPI.MAX)
        return result[0]

    def _in_turn(self, tag: int, operation: Callable[[int], Coroutine[T]]) -> Coroutine[T]:
        """Carry out an operation after earlier ones that share its slot.

        MPI's tags are limited, so each slot has SEGMENTS of them, and all operations whose tag is
        the same modulo `slots` share a slot. All ranks start these in the same order.

        Args:
            tag: the operation's number.
            operation: makes the coroutine, given its first MPI tag.
        """
        slot = tag % self.slots
        turn = self._started[slot]
        self._started[slot] += 1
        yield lambda: self._ended[slot] == turn
        result = yield from operation(slot * SEGMENTS)
        self._ended[slot] += 1
        return result

    def _sum(self, segment: Tensor, tag: int) -> Coroutine[None]:
        """Sum one segment: a reduce-scatter, then a gather, with one chunk for each rank."""
        chunks = list(segment.tensor_split(self.group.size))
        sends = []
        for receive, arrived, own, theirs in self._reduction(chunks, segment.dtype, tag):
            sends.append(self._send(chunks[own], tag))
            yield receive
            chunks[theirs].add_(arrived)
        yield from sends  # the chunks that were sent are received into next
        yield from self._pass_round(chunks, (self.group.rank + 1) % len(chunks), tag)

    def _reduce(self, chunks: list[Tensor], dtype: torch.dtype, tag: int) -> Coroutine[None]:
        """Sum the chunk of this rank's number; the other chunks are overwritten."""
        # `_reduction` leaves rank r the sum of chunk r + 1.
        turned = [*chunks[-1:], *chunks[:-1]]
        sends = []
        for receive, arrived, own, theirs in self._reduction(turned, dtype, tag):
            sends.append(self._send(turned[own], tag))
            yield receive
            turned[theirs].add_(arrived)
        yield from sends

    def _sum_16(
        self, segment: Tensor, dtype: torch.dtype, lost: Tensor, tag: int
    ) -> Coroutine[None]:
        """Do `_sum` with 16-bit messages; numbers are added in the segment's own dtype."""
        n, rank = self.group.size, self.group.rank
        chunks, losses = segment.tensor_split(n), lost.tensor_split(n)
        short = [chunk.to(dtype) for chunk in chunks]  # memory; all are overwritten below
        sends = []
        for receive, arrived, own, theirs in self._reduction(chunks, dtype, tag):
            short[own] = rounded(chunks[own], dtype, losses[own])
            sends.append(self._send(short[own], tag))
            yield receive
            chunks[theirs].add_(arrived)
        # The finished chunk is rounded here, too, so that all ranks get the same bits.
        mine = (rank + 1) % n
        short[mine] = rounded(chunks[mine], dtype, losses[mine])
        yield from sends
        yield from self._pass_round(short, mine, tag)
        for chunk, its in zip(chunks, short, strict=True):
            chunk.copy_(its)

    def _reduction(
        self, chunks: Any, dtype: torch.dtype, tag: int
    ) -> Iterator[tuple[Any, Tensor, int, int]]:
        """The rounds of a reduce-scatter, with their receives posted.

        Yields:
            The request of the receive, its memory, the number of the chunk to send, and the number
            of the chunk that arrives.
        """

        def rounds() -> Iterator[tuple[Any, Tensor, int, int]]:
            n, rank = self.group.size, self.group.rank
            for number in range(n - 1):
                # The chunk that arrives in one round has this rank's numbers added and is sent in
                # the next. After n - 1 rounds chunk rank + 1 has the numbers of all ranks.
                own, theirs = (rank - number) % n, (rank - number - 1) % n
                arrived = torch.empty(len(chunks[theirs]), dtype=dtype)
                yield self._receive(arrived, tag), arrived, own, theirs

        return _some_ahead(rounds())

    def _pass_round(self, chunks: list[Tensor], mine: int, tag: int) -> Coroutine[None]:
        """Give all ranks all chunks: this rank has chunk `mine`, the rank before it mine - 1."""
        n = len(chunks)
        receives = (self._receive(chunks[(mine - step - 1) % n], tag) for step in range(n - 1))
        sends = []
        for step, receive in enumerate(_some_ahead(receives)):
            sends.append(self._send(chunks[(mine - step) % n], tag))
            yield receive
        yield from sends

    def _send(self, chunk: Tensor, tag: int, to: int | None = None) -> Any:
        """Begin to send to a rank, by default the next one."""
        self.bytes_sent += chunk.nbytes
        return self.comm.Isend(_bytes(chunk), dest=self.next if to is None else to, tag=tag)

    def _receive(self, chunk: Tensor, tag: int, source: int | None = None) -> Any:
        """Begin to receive from a rank, by default the one before."""
        source = self.previous if source is None else source
        return self.comm.Irecv(_bytes(chunk), source=source, tag=tag)


class Library(Ring):
    """A `Ring` whose exact sums are computed by the MPI library, which knows large machines.

    All ranks must start these sums in the same order.
    """

    def sum_(self, flat: Tensor, tag: int) -> Coroutine[None]:
        """Replace a contiguous tensor by its sum over the ranks. Collective."""
        from mpi4py import MPI

        from hpc_train.collectives import mpi

        n = self.group.size
        self.bytes_sent += 2 * (n - 1) * flat.nbytes // n
        datatype = mpi.MPI_TYPES[flat.dtype]
        # All pieces are begun at once: begun later, their order could differ between ranks.
        yield from [
            self.comm.Iallreduce(MPI.IN_PLACE, [piece, datatype], op=MPI.SUM)
            for piece in mpi.pieces(flat.detach())
        ]

    def reduce_scatter_(self, flat: Tensor, cuts: Sequence[int], tag: int) -> Coroutine[None]:
        """Give this rank's part of a tensor its sum (see `Cross`). Collective."""
        from mpi4py import MPI

        from hpc_train.collectives import mpi

        if flat.nbytes > mpi.LARGEST_MESSAGE:  # MPI's counts are 32-bit integers
            yield from super().reduce_scatter_(flat, cuts, tag)
            return
        counts = [end - begin for begin, end in itertools.pairwise(cuts)]
        mine = flat[cuts[self.group.rank] : cuts[self.group.rank + 1]]
        total = torch.empty_like(mine)
        self.bytes_sent += flat.nbytes - mine.nbytes
        datatype = mpi.MPI_TYPES[flat.dtype]
        yield self.comm.Ireduce_scatter(
            [flat.detach().numpy(), datatype], [total.numpy(), datatype], counts, op=MPI.SUM
        )
        mine.copy_(total)

    def all_gather_(self, flat: Tensor, cuts: Sequence[int], tag: int) -> Coroutine[None]:
        """Give all ranks all parts of a tensor (see `Cross`). Collective."""
        from mpi4py import MPI

        from hpc_train.collectives import mpi

        if flat.nbytes > mpi.LARGEST_MESSAGE:
            yield from super().all_gather_(flat, cuts, tag)
            return
        size, n = flat.element_size(), self.group.size
        counts = [size * (end - begin) for begin, end in itertools.pairwise(cuts)]
        begins = [size * begin for begin in cuts[:-1]]
        self.bytes_sent += (n - 1) * counts[self.group.rank]
        yield self.comm.Iallgatherv(MPI.IN_PLACE, [_bytes(flat), counts, begins, MPI.BYTE])


def _some_ahead(items: Iterator[T]) -> Iterator[T]:
    """The items; SEGMENTS_AHEAD of them are made before the first one is used.

    If all receives of a large ring were posted at once, MPI would search a long list of them for
    each message.
    """
    made = deque(itertools.islice(items, SEGMENTS_AHEAD))
    while made:
        yield made.popleft()
        made.extend(itertools.islice(items, 1))


def _segments(flat: Tensor, n: int) -> list[Tensor]:
    return list(flat.tensor_split(_count_segments(flat, n)))


def _count_segments(flat: Tensor, n: int) -> int:
    """The number of segments of a sum over n ranks."""
    chunk = min(max(flat.nbytes // (n * PIPELINED), SMALLEST_CHUNK), LARGEST_CHUNK)
    wanted = flat.nbytes // (n * chunk)
    return max(1, min(wanted, SEGMENTS))


def _cut_segments(flat: Tensor, cuts: Sequence[int]) -> list[list[Tensor]]:
    """Cut each rank's part of a tensor into pieces: for each segment, one chunk for each rank."""
    count = _count_segments(flat, len(cuts) - 1)
    parts = [flat[begin:end].tensor_split(count) for begin, end in itertools.pairwise(cuts)]
    return [list(chunks) for chunks in zip(*parts, strict=True)]


def rounded(chunk: Tensor, dtype: torch.dtype, lost: Tensor) -> Tensor:
    """The chunk in another dtype; the rounding error is added to `lost`."""
    short = chunk.to(dtype)
    lost.add_(chunk).sub_(short)
    return short


def _bytes(chunk: Tensor) -> Any:
    """A chunk's bytes as a buffer for mpi4py, which keeps it until the request is done."""
    return chunk.detach().view(-1).view(torch.uint8).numpy()
