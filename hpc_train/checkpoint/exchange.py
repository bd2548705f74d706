"""Bring extents together from the ranks that hold tensors in parts, and hand them out again.

The ranks of a replica know of each other which parts they hold, so both ends of a message know what
is in it: the pieces' bytes behind each other. Nothing but MPI_Alltoallv moves, in rounds of so many
extents that a rank needs little memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from hpc_train.checkpoint.fileformat import Held, Layout
from hpc_train.checkpoint.parts import Bytes, Parts, Piece, Specs, pack, pieces_of, total, unpack
from hpc_train.mpi.group import Group

AT_ONCE = 16  # extents, and ranks that receive them, of a round: 256 MiB on either side

Room = Callable[[int], Bytes]
"""Gives memory for so many bytes."""


class Scratch:
    """Memory for one extent after the other: what it gave before is given again."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> Bytes:
        """Memory for so many bytes."""
        if len(self._memory) < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]


class Exchange:
    """The tensors that the ranks of a replica hold together. All of them make it and call it.

    Args:
        held: this rank's parts.
        specs: by rank of the replica: which parts count, of this rank of `held`.
        layout: of the file.
        replica: the ranks.
    """

    def __init__(
        self, held: Mapping[str, Held], specs: Sequence[Specs], layout: Layout, replica: Group
    ) -> None:
        self.parts = Parts(held)
        self.specs = specs
        self.layout = layout
        self.replica = replica
        self.pieces = lru_cache(maxsize=4 * AT_ONCE)(self._pieces)
        """What a rank of the replica has of an extent, by both their numbers."""
        self._out, self._into = Scratch(), Scratch()

    def _pieces(self, rank: int, number: int) -> list[Piece]:
        return pieces_of(self.specs[rank], self.layout, *self.layout.extent(number))

    def bring(
        self, runs: Sequence[Sequence[int]], rounds: int, room: Room, *, own: bool
    ) -> Iterator[tuple[int, Bytes] | None]:
        """Bring each rank its extents, one in each round, or None. Collective over the replica.

        Args:
            runs: by rank: the extents that it gets.
            rounds: how many there are, also for ranks with fewer extents.
            room: gives the memory that an extent is put together in.
            own: whether an extent may be given as the memory of a tensor, where it lies in one.
        """
        for turn in range(rounds):
            mine = None
            for first in range(0, self.replica.size, AT_ONCE):
                ranks = range(first, min(first + AT_ONCE, self.replica.size))
                wanted = {rank: runs[rank][turn] for rank in ranks if turn < len(runs[rank])}
                mine = self._bring(wanted, room, own=own) or mine
            yield mine

    def _bring(
        self, wanted: Mapping[int, int], room: Room, *, own: bool
    ) -> tuple[int, Bytes] | None:
        me = self.replica.rank
        number = wanted.get(me)
        due = (
            [self.pieces(rank, number) for rank in range(self.replica.size)]
            if number is not None
            else []
        )
        if self.replica.comm is None:
            if number is None:
                return None
            extent = self.parts.memory(due[0], self.layout.size(number)) if own else None
            if extent is None:
                extent = room(self.layout.size(number))
                self.parts.gather(due[0], extent)
            return number, extent
        sent = {to: self.pieces(me, asked) for to, asked in wanted.items()}
        received = self._exchanged(
            {to: total(pieces) for to, pieces in sent.items()},
            dict(enumerate(map(total, due))),
            lambda to, packed: self.parts.pack(sent[to], packed),
        )
        if number is None:
            return None
        extent = room(self.layout.size(number))
        unpack(received, (piece for pieces in due for piece in pieces), extent)
        return number, extent

    def hand_out(self, read: Mapping[int, int], extent: Bytes | None) -> Bytes:
        """Hand each rank what it holds of extents. Collective over the replica.

        Args:
            read: by rank: the extent that it has; at most AT_ONCE.
            extent: this rank's, if it has one.

        Returns:
            What this rank holds, piece behind piece, in the order of the ranks that have it.
        """
        me, size = self.replica.rank, self.replica.size
        due = {rank: total(self.pieces(me, number)) for rank, number in read.items()}
        mine: Bytes = np.empty(0, np.uint8)
        for first in range(0, size, AT_ONCE):
            ranks = range(first, min(first + AT_ONCE, size))
            sent = {to: self.pieces(to, read[me]) for to in ranks} if me in read else {}

            def fill(to: int, packed: Bytes, sent: Mapping[int, list[Piece]] = sent) -> None:
                assert extent is not None
                pack(extent, sent[to], packed)

            counts = {to: total(pieces) for to, pieces in sent.items()}
            got = self._exchanged(counts, due if me in ranks else {}, fill)
            if me in ranks:
                mine = got
        return mine

    def _exchanged(
        self,
        sent: Mapping[int, int],
        due: Mapping[int, int],
        fill: Callable[[int, Bytes], None],
    ) -> Bytes:
        """One MPI_Alltoallv; returns what comes, by rank. Collective over the replica.

        Args:
            sent: bytes by rank.
            due: bytes that come, by rank.
            fill: puts what is for a rank into memory.
        """
        if self.replica.comm is None:
            packed = self._out(sent[0])
            fill(0, packed)
            return packed
        from mpi4py import MPI  # a group with a communicator has MPI

        counts, places, nbytes = _places(sent, self.replica.size)
        out = self._out(nbytes)
        for rank in sent:
            fill(rank, out[places[rank] : places[rank] + counts[rank]])
        expected, begins, nbytes = _places(due, self.replica.size)
        into = self._into(nbytes)
        with self.replica.waiting("extents of a checkpoint"):
            self.replica.comm.Alltoallv(
                [out, counts, places, MPI.BYTE], [into, expected, begins, MPI.BYTE]
            )
        return into


def _places(nbytes: Mapping[int, int], size: int) -> tuple[list[int], list[int], int]:
    """Bytes for each rank, where they begin, and how many there are."""
    counts = [nbytes.get(rank, 0) for rank in range(size)]
    places = [0, *itertools.accumulate(counts)]
    return counts, places[:-1], places[-1]
