"""Sums over ranks of different nodes in few rounds, for many nodes.

Recursive halving and doubling. In each round of the first half two ranks exchange half of the
numbers that they still add up; the less is left, the nearer their ranks are. The second half goes
the same way back, with twice as many numbers in each round. n ranks need 2 log2(n) rounds, where a
ring needs 2 (n - 1), and send as many bytes (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", IJHPCA 19, 2005). If n is not a power of two, some
ranks first give their numbers to another one, so that a power of two is left, and get the result
from it at the end. Unlike in a ring, messages go to distant ranks, all at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.collectives.ring import SEGMENTS, Ring, rounded

SEGMENT_BYTES = 1 << 20  # at least; while one segment is added up, another is on its way


class Halving(Ring):
    """Implements `Cross` in a number of rounds that grows with the logarithm of the ranks.

    Collective to make.

    Args:
        group: one rank of each node.
    """

    def sum_(self, flat: Tensor, tag: int) -> Coroutine[None]:
        """Replace a contiguous tensor by its sum over the ranks. Collective."""
        return self._in_turn(tag, lambda first: self._segmented(flat, flat.dtype, None, first))

    def sum_16_(
        self, flat: Tensor, dtype: torch.dtype, residual: Tensor, tag: int
    ) -> Coroutine[None]:
        """Replace a contiguous tensor by its sum, with 16-bit messages (see `Cross`)."""
        return self._in_turn(tag, lambda first: self._segmented(flat, dtype, residual, first))

    def gather(self, payload: Tensor, tag: int) -> Coroutine[Tensor]:
        """The payloads of all ranks (see `Cross`), in log2(n) rounds.

        Each round exchanges twice as many payloads (Bruck et al., IEEE TPDS 8, 1997).
        """
        return self._in_turn(tag, lambda first: self._gathered(payload, first))

    def _gathered(self, payload: Tensor, tag: int) -> Coroutine[Tensor]:
        n, rank = self.group.size, self.group.rank
        found = payload.new_empty((n, *payload.shape))  # found[i] comes from rank (rank + i) % n
        found[0] = payload
        have = 1
        while have < n:
            more = min(have, n - have)
            receive = self._receive(found[have : have + more], tag, (rank + have) % n)
            send = self._send(found[:more], tag, (rank - have) % n)
            yield receive
            yield send
            have += more
        return found.roll(rank, 0)

    def _segmented(
        self, flat: Tensor, dtype: torch.dtype, residual: Tensor | None, tag: int
    ) -> Coroutine[None]:
        several = flat.tensor_split(max(1, min(flat.nbytes // SEGMENT_BYTES, SEGMENTS)))
        sizes = [len(segment) for segment in several]
        losses = [None] * len(several) if residual is None else residual.split(sizes)
        yield [
            self._sum_halves(segment, dtype, lost, tag + number)
            for number, (segment, lost) in enumerate(zip(several, losses, strict=True))
        ]

    def _sum_halves(
        self, flat: Tensor, dtype: torch.dtype, lost: Tensor | None, tag: int
    ) -> Coroutine[None]:
        """Sum a segment over the ranks.

        Args:
            flat: the segment, which is replaced.
            dtype: dtype of the messages.
            lost: gets the rounding errors of this rank added; None if messages are exact.
            tag: MPI tag of the messages.
        """
        n, rank = self.group.size, self.group.rank
        power = 1 << n.bit_length() - 1
        # Of the first 2 * beyond ranks the even ones give their numbers to the next rank.
        beyond = n - power
        result = flat if lost is None else torch.empty(len(flat), dtype=dtype)

        def outgoing(begin: int, end: int) -> Tensor:
            part = flat[begin:end]
            return part if lost is None else rounded(part, dtype, lost[begin:end])

        if rank < 2 * beyond and rank % 2 == 0:
            yield self._send(outgoing(0, len(flat)), tag, rank + 1)
            yield self._receive(result, tag, rank + 1)
        else:
            if rank < 2 * beyond:
                arrived = torch.empty(len(flat), dtype=dtype)
                yield self._receive(arrived, tag, rank - 1)
                flat.add_(arrived)
            place = rank // 2 if rank < 2 * beyond else rank - beyond
            begin, end, distance = 0, len(flat), power // 2
            rounds = []
            while distance:
                other = place ^ distance
                peer = 2 * other + 1 if other < beyond else other + beyond
                middle = (begin + end) // 2
                halves = [(begin, middle), (middle, end)]
                mine, theirs = halves if place < other else halves[::-1]
                arrived = torch.empty(mine[1] - mine[0], dtype=dtype)
                receive = self._receive(arrived, tag, peer)
                send = self._send(outgoing(*theirs), tag, peer)
                yield receive
                flat[slice(*mine)].add_(arrived)
                yield send
                rounds.append((peer, mine, theirs))
                (begin, end), distance = mine, distance // 2
            if lost is not None:
                result[begin:end] = outgoing(begin, end)
            for peer, mine, theirs in reversed(rounds):
                receive = self._receive(result[slice(*theirs)], tag, peer)
                send = self._send(result[slice(*mine)], tag, peer)
                yield receive
                yield send
            if rank < 2 * beyond:
                yield self._send(result, tag, rank - 1)
        if lost is not None:
            flat.copy_(result)
