"""Sums over ranks of different nodes: a pipelined ring for slow links, or MPI's own.

A ring is bandwidth-optimal: of n ranks each sends 2 (n - 1) / n of the data, to one neighbour only,
so no link is asked for more than it has (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 69, 2009). Here the data go round in segments that do
not wait for each other: while one is added up, others are on the wire.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hpc_train.collectives.steps import Steps
from hpc_train.mpi.group import Group

# Of a message: large ones cost less processor time, but several segments have to be on their way.
SMALLEST_CHUNK, LARGEST_CHUNK = 1 << 15, 1 << 17
PIPELINED = 4
SEGMENTS = 16  # of one operation at most; each has a tag, of which MPI promises 32767


class Cross(Protocol):
    """Operations over ranks of different nodes, one per node.

    All ranks start the same operations; those under way at the same time have different tags.
    """

    group: Group
    bytes_sent: int

    def sum_(self, flat: Tensor, tag: int) -> Steps[None]:
        """Replace a contiguous float32 or float64 tensor of one dimension by its sum."""

    def sum_16_(self, flat: Tensor, dtype: torch.dtype, residual: Tensor, tag: int) -> Steps[None]:
        """`sum_` with 16-bit numbers on the wire.

        A rank that rounds adds what was lost to its `residual`, of the shape and type of `flat`.
        """

    def gather(self, payload: Tensor, tag: int) -> Steps[Tensor]:
        """The ranks' payloads, (n, *shape), in the order of ranks; any dtype."""

    def close(self) -> None:
        """Release what it holds. Collective."""


class Ring:
    """Implements `Cross` by messages to the next rank. Collective to make.

    Args:
        group: one rank of each node.
    """

    def __init__(self, group: Group) -> None:
        assert group.comm is not None
        self.group = group
        self.comm = group.comm.Dup()  # our tags are ours alone
        self.next = (group.rank + 1) % group.size
        self.previous = (group.rank - 1) % group.size
        self.bytes_sent = 0

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()

    def sum_(self, flat: Tensor, tag: int) -> Steps[None]:
        """Replace a contiguous tensor by its sum over the ranks."""
        segments = _segments(flat, self.group.size)
        first = tag * SEGMENTS
        yield [self._sum(segment, first + number) for number, segment in enumerate(segments)]

    def sum_16_(self, flat: Tensor, dtype: torch.dtype, residual: Tensor, tag: int) -> Steps[None]:
        """Replace a contiguous tensor by its sum over the ranks, rounded to 16 bit on the way."""
        segments = _segments(flat, self.group.size)
        losses = residual.split([len(segment) for segment in segments])
        first = tag * SEGMENTS
        yield [
            self._sum_16(segment, dtype, lost, first + number)
            for number, (segment, lost) in enumerate(zip(segments, losses, strict=True))
        ]

    def gather(self, payload: Tensor, tag: int) -> Steps[Tensor]:
        """Pass every rank's payload round."""
        whole = payload.new_empty((self.group.size, *payload.shape))
        whole[self.group.rank] = payload
        yield from self._pass_round(list(whole), self.group.rank, tag * SEGMENTS)
        return whole

    def _sum(self, segment: Tensor, tag: int) -> Steps[None]:
        """Reduce-scatter and gather of one segment, in as many chunks as there are ranks."""
        chunks = list(segment.tensor_split(self.group.size))
        sends = []
        for receive, arrived, own, theirs in self._reduction(chunks, segment.dtype, tag):
            sends.append(self._send(chunks[own], tag))
            yield receive
            chunks[theirs].add_(arrived)
        yield from sends  # their memory is received into
        yield from self._pass_round(chunks, (self.group.rank + 1) % len(chunks), tag)

    def _sum_16(self, segment: Tensor, dtype: torch.dtype, lost: Tensor, tag: int) -> Steps[None]:
        """`_sum` of 16-bit numbers, added up in the segment's own type."""
        n, rank = self.group.size, self.group.rank
        chunks, losses = segment.tensor_split(n), lost.tensor_split(n)
        short = [chunk.to(dtype) for chunk in chunks]  # as they are before anything is added
        sends = []
        for receive, arrived, own, theirs in self._reduction(chunks, dtype, tag):
            short[own] = _rounded(chunks[own], dtype, losses[own])
            sends.append(self._send(short[own], tag))
            yield receive
            chunks[theirs].add_(arrived)
        mine = (rank + 1) % n
        short[mine] = _rounded(chunks[mine], dtype, losses[mine])
        yield from sends
        yield from self._pass_round(short, mine, tag)
        for chunk, rounded in zip(chunks, short, strict=True):
            chunk.copy_(rounded)

    def _reduction(
        self, chunks: Any, dtype: torch.dtype, tag: int
    ) -> list[tuple[Any, Tensor, int, int]]:
        """Of each round: the request and memory of what arrives, the chunk that goes and comes."""
        n, rank = self.group.size, self.group.rank
        rounds = []
        for number in range(n - 1):
            own, theirs = (rank - number) % n, (rank - number - 1) % n
            arrived = torch.empty(len(chunks[theirs]), dtype=dtype)
            rounds.append((self._receive(arrived, tag), arrived, own, theirs))
        return rounds

    def _pass_round(self, chunks: list[Tensor], mine: int, tag: int) -> Steps[None]:
        """Give all ranks all chunks, of which this rank has `mine` and the one before mine - 1."""
        n = len(chunks)
        receives = [self._receive(chunks[(mine - step - 1) % n], tag) for step in range(n - 1)]
        sends = []
        for step, receive in enumerate(receives):
            sends.append(self._send(chunks[(mine - step) % n], tag))
            yield receive
        yield from sends

    def _send(self, chunk: Tensor, tag: int) -> Any:
        self.bytes_sent += chunk.nbytes
        return self.comm.Isend(_bytes(chunk), dest=self.next, tag=tag)

    def _receive(self, chunk: Tensor, tag: int) -> Any:
        return self.comm.Irecv(_bytes(chunk), source=self.previous, tag=tag)


class Library(Ring):
    """`Ring`, but whole sums are left to the MPI library, which knows large machines.

    All ranks must start its sums in the same order.
    """

    def sum_(self, flat: Tensor, tag: int) -> Steps[None]:
        """Replace a contiguous tensor by its sum over the ranks."""
        from mpi4py import MPI  # this module loads without, for a process alone

        from hpc_train.collectives.mpi import SUMMABLE

        n = self.group.size
        self.bytes_sent += 2 * (n - 1) * flat.nbytes // n
        buffer = [flat.detach().numpy(), SUMMABLE[flat.dtype]]
        yield self.comm.Iallreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)


def _segments(flat: Tensor, n: int) -> list[Tensor]:
    chunk = min(max(flat.nbytes // (n * PIPELINED), SMALLEST_CHUNK), LARGEST_CHUNK)
    wanted = flat.nbytes // (n * chunk)
    return list(flat.tensor_split(max(1, min(wanted, SEGMENTS))))


def _rounded(chunk: Tensor, dtype: torch.dtype, lost: Tensor) -> Tensor:
    """The chunk in another type; what that loses is added to `lost`."""
    rounded = chunk.to(dtype)
    lost.add_(chunk).sub_(rounded)
    return rounded


def _bytes(chunk: Tensor) -> Any:
    """What mpi4py takes, and keeps as long as the request lives."""
    return chunk.detach().view(-1).view(torch.uint8).numpy()
