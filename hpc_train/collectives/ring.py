"""Sums over ranks of different nodes: a pipelined ring for slow links, or MPI's own.

A ring is bandwidth-optimal: of n ranks each sends 2 (n - 1) / n of the data, to one neighbour only,
so no link is asked for more than it has (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 69, 2009). Here the data go round in segments that do
not wait for each other: while one is added up, others are on the wire.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.mpi.group import Group

# Of a message: large ones cost less processor time, but several segments have to be on their way.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 15, 1 << 17
PIPELINED = 4
SEGMENTS = 16  # of one operation at most; each has a tag
SEGMENTS_AHEAD = 2  # receives of a segment that are posted before they are waited for

T = TypeVar("T")


class Cross(Protocol):
    """Operations over ranks of different nodes, one per node.

    All ranks start the same operations; those under way at the same time have different tags.
    """

    group: Group
    bytes_sent: int

    def sum_(self, flat: Tensor, tag: int) -> Coroutine[None]:
        """Replace a contiguous float32 or float64 tensor of one dimension by its sum."""

    def sum_16_(
        self, flat: Tensor, dtype: torch.dtype, residual: Tensor, tag: int
    ) -> Coroutine[None]:
        """`sum_` with 16-bit numbers on the wire.

        A rank that rounds adds what was lost to its `residual`, of the shape and type of `flat`.
        """

    def gather(self, payload: Tensor, tag: int) -> Coroutine[Tensor]:
        """The ranks' payloads, (n, *shape), in the order of ranks; any dtype."""

    def largest(self, number: float) -> Coroutine[float]:
        """The largest of the ranks' numbers, none NaN. All ranks start these in one order."""

    def close(self) -> None:
        """Release what it holds. Collective."""


class Ring:
    """Implements `Cross` by messages to the next rank. Collective to make.

    Args:
        group: one rank of each node.
    """

    def __init__(self, group: Group) -> None:
        from mpi4py import MPI  # this module loads without, for a process alone

        assert group.comm is not None
        self.group = group
        self.comm = group.comm.Dup()  # our tags are ours alone
        self.slots = ((MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1) // SEGMENTS
        """Operations under way at once; MPI promises tags for 2048, most have more."""
        self._started: Counter[int] = Counter()  # operations, by slot
        self._ended: Counter[int] = Counter()
        self.next = (group.rank + 1) % group.size
        self.previous = (group.rank - 1) % group.size
        self.bytes_sent = 0

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()

    def sum_(self, flat: Tensor, tag: int) -> Coroutine[None]:
        """Replace a contiguous tensor by its sum over the ranks."""

        def segments(first: int) -> Coroutine[None]:
            several = _segments(flat, self.group.size)
            yield [self._sum(segment, first + number) for number, segment in enumerate(several)]

        return self._in_turn(tag, segments)

    def sum_16_(
        self, flat: Tensor, dtype: torch.dtype, residual: Tensor, tag: int
    ) -> Coroutine[None]:
        """Replace a contiguous tensor by its sum over the ranks, rounded to 16 bit on the way."""

        def segments(first: int) -> Coroutine[None]:
            several = _segments(flat, self.group.size)
            losses = residual.split([len(segment) for segment in several])
            yield [
                self._sum_16(segment, dtype, lost, first + number)
                for number, (segment, lost) in enumerate(zip(several, losses, strict=True))
            ]

        return self._in_turn(tag, segments)

    def gather(self, payload: Tensor, tag: int) -> Coroutine[Tensor]:
        """Pass every rank's payload round."""

        def passed(first: int) -> Coroutine[Tensor]:
            whole = payload.new_empty((self.group.size, *payload.shape))
            whole[self.group.rank] = payload
            yield from self._pass_round(list(whole), self.group.rank, first)
            return whole

        return self._in_turn(tag, passed)

    def largest(self, number: float) -> Coroutine[float]:
        """By MPI's own maximum, whose messages cost less than ours."""
        from mpi4py import MPI

        result = array("d", [number])
        yield self.comm.Iallreduce(MPI.IN_PLACE, result, op=MPI.MAX)
        return result[0]

    def _in_turn(self, tag: int, operation: Callable[[int], Coroutine[T]]) -> Coroutine[T]:
        """Carry out an operation, given its first MPI tag, after those that have the same one.

        MPI's tags are limited, and so there are slots. Ranks start what shares one in one order.
        """
        slot = tag % self.slots
        turn = self._started[slot]
        self._started[slot] += 1
        yield lambda: self._ended[slot] == turn
        result = yield from operation(slot * SEGMENTS)
        self._ended[slot] += 1
        return result

    def _sum(self, segment: Tensor, tag: int) -> Coroutine[None]:
        """Reduce-scatter and gather of one segment, in as many chunks as there are ranks."""
        chunks = list(segment.tensor_split(self.group.size))
        sends = []
        for receive, arrived, own, theirs in self._reduction(chunks, segment.dtype, tag):
            sends.append(self._send(chunks[own], tag))
            yield receive
            chunks[theirs].add_(arrived)
        yield from sends  # their memory is received into
        yield from self._pass_round(chunks, (self.group.rank + 1) % len(chunks), tag)

    def _sum_16(
        self, segment: Tensor, dtype: torch.dtype, lost: Tensor, tag: int
    ) -> Coroutine[None]:
        """`_sum` of 16-bit numbers, added up in the segment's own type."""
        n, rank = self.group.size, self.group.rank
        chunks, losses = segment.tensor_split(n), lost.tensor_split(n)
        short = [chunk.to(dtype) for chunk in chunks]  # as they are before anything is added
        sends = []
        for receive, arrived, own, theirs in self._reduction(chunks, dtype, tag):
            short[own] = rounded(chunks[own], dtype, losses[own])
            sends.append(self._send(short[own], tag))
            yield receive
            chunks[theirs].add_(arrived)
        mine = (rank + 1) % n
        short[mine] = rounded(chunks[mine], dtype, losses[mine])
        yield from sends
        yield from self._pass_round(short, mine, tag)
        for chunk, its in zip(chunks, short, strict=True):
            chunk.copy_(its)

    def _reduction(
        self, chunks: Any, dtype: torch.dtype, tag: int
    ) -> Iterator[tuple[Any, Tensor, int, int]]:
        """Of each round: the request and memory of what arrives, the chunk that goes and comes."""

        def rounds() -> Iterator[tuple[Any, Tensor, int, int]]:
            n, rank = self.group.size, self.group.rank
            for number in range(n - 1):
                own, theirs = (rank - number) % n, (rank - number - 1) % n
                arrived = torch.empty(len(chunks[theirs]), dtype=dtype)
                yield self._receive(arrived, tag), arrived, own, theirs

        return _some_ahead(rounds())

    def _pass_round(self, chunks: list[Tensor], mine: int, tag: int) -> Coroutine[None]:
        """Give all ranks all chunks, of which this rank has `mine` and the one before mine - 1."""
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
    """`Ring`, but whole sums are left to the MPI library, which knows large machines.

    All ranks must start its sums in the same order.
    """

    def sum_(self, flat: Tensor, tag: int) -> Coroutine[None]:
        """Replace a contiguous tensor by its sum over the ranks."""
        from mpi4py import MPI

        from hpc_train.collectives import mpi

        n = self.group.size
        self.bytes_sent += 2 * (n - 1) * flat.nbytes // n
        datatype = mpi.MPI_TYPES[flat.dtype]
        # All are begun at once: later ones would come in another order on another rank.
        yield from [
            self.comm.Iallreduce(MPI.IN_PLACE, [piece, datatype], op=MPI.SUM)
            for piece in mpi.pieces(flat.detach())
        ]


def _some_ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, of which AHEAD have been made when the first of them is used.

    A ring of many ranks would else have as many receives in the list that MPI searches for each
    message.
    """
    made = deque(itertools.islice(items, SEGMENTS_AHEAD))
    while made:
        yield made.popleft()
        made.extend(itertools.islice(items, 1))


def _segments(flat: Tensor, n: int) -> list[Tensor]:
    chunk = min(max(flat.nbytes // (n * PIPELINED), SMALLEST_CHUNK), LARGEST_CHUNK)
    wanted = flat.nbytes // (n * chunk)
    return list(flat.tensor_split(max(1, min(wanted, SEGMENTS))))


def rounded(chunk: Tensor, dtype: torch.dtype, lost: Tensor) -> Tensor:
    """The chunk in another type; what that loses is added to `lost`."""
    short = chunk.to(dtype)
    lost.add_(chunk).sub_(short)
    return short


def _bytes(chunk: Tensor) -> Any:
    """What mpi4py takes, and keeps as long as the request lives."""
    return chunk.detach().view(-1).view(torch.uint8).numpy()
