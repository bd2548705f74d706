"""Bring extents together from the ranks that hold parts of tensors, and hand them out again.

Both ends of a message know which pieces it has. So it consists of their bytes, one piece behind the
other. A rank sends only to the ranks that need some of its bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hpc_train.checkpoint.fileformat import FileMap
from hpc_train.checkpoint.parts import Bytes, Parts, Piece, Strip, pack, total, unpack_pieces
from hpc_train.checkpoint.routes import Routes
from hpc_train.mpi.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI

# The largest number of messages that a rank has under way, and of ranks that hand out extents at
# once. With extents of 16 MiB that is 256 MiB on either side.
MESSAGES_AT_ONCE = 16
WAITING = "extents of a checkpoint"  # what the watchdog says that a rank waits for

Room = Callable[[int], Bytes]
"""Returns memory for a number of bytes."""

Expected: TypeAlias = "tuple[MPI.Request, Bytes, list[Piece]]"
"""A message to be received: its request, its memory, and its pieces."""


class Scratch:
    """A reusable buffer: each call returns the same memory, so the previous content is lost."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> Bytes:
        """Memory for `nbytes` bytes."""
        if len(self._memory) < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]


class Outgoing:
    """Messages under way to other ranks, in memory that is used again.

    Args:
        replica: the ranks that they go to.
    """

    def __init__(self, replica: Group) -> None:
        self.replica = replica
        self._rooms = [Scratch() for _ in range(MESSAGES_AT_ONCE)]
        self._requests: list[MPI.Request] = []

    def reserve(self, nbytes: list[int]) -> None:
        """Get memory for messages of these sizes, in bytes."""
        for room in self._rooms[: len(nbytes)]:
            room(max(nbytes))

    def send(self, rank: int, nbytes: int, fill: Callable[[Bytes], None]) -> None:
        """Send a message to a rank. Without bytes nothing is sent.

        Args:
            rank: of the replica.
            nbytes: of the message.
            fill: writes the message to the memory that it is given.
        """
        if not nbytes:
            return
        assert self.replica.comm is not None
        turn = len(self._requests) % MESSAGES_AT_ONCE
        if len(self._requests) >= MESSAGES_AT_ONCE:
            with self.replica.waiting(WAITING):
                self._requests[-MESSAGES_AT_ONCE].Wait()
        packed = self._rooms[turn](nbytes)
        fill(packed)
        self._requests.append(self.replica.comm.Isend(packed, rank))

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        with self.replica.waiting(WAITING):
            for request in self._requests[-MESSAGES_AT_ONCE:]:
                request.Wait()
        self._requests.clear()


class Exchange:
    """Moves the bytes of extents between the ranks of a replica. All of them make it and call it.

    Args:
        parts: this rank's parts of tensors.
        routes: tells which rank has which pieces of an extent.
        layout: of the file.
        replica: the ranks that hold the tensors together.
        state: the bytes that follow the tensors in a file that is written. All ranks have them.
    """

    def __init__(
        self, parts: Parts, routes: Routes, layout: FileMap, replica: Group, state: bytes = b""
    ) -> None:
        self.parts, self.routes, self.replica = parts, routes, replica
        self.layout = layout
        self._state = np.frombuffer(state, np.uint8)
        self._into, self._outgoing = Scratch(), Outgoing(replica)

    def mine(self, number: int) -> list[Piece]:
        """This rank's pieces of an extent."""
        return self.routes.pieces(self.replica.rank, number)

    def _joined(self, number: int) -> list[Piece | Strip]:
        known = self.routes.strips
        if number not in known:
            known[number] = self.parts.joined(self.mine(number))
        return known[number]

    def reserve(self) -> None:
        """Get memory for all that `bring` sends and receives. It calls no other rank.

        Otherwise a rank could run out of memory while other ranks wait for its messages.
        """
        asked = [total(self._joined(number)) for number in self.routes.asked]
        self._outgoing.reserve(asked)
        numbers = [number for number, ranks in self.routes.holders.items() if ranks]
        self._into(max((self.layout.size(number) for number in numbers), default=0))

    def bring(
        self, runs: Sequence[Sequence[int]], rounds: int, room: Room, *, own: bool
    ) -> Iterator[tuple[int, Bytes] | None]:
        """Bring each rank its extents. Collective over the replica.

        Args:
            runs: for each rank the numbers of the extents that it gets.
            rounds: the number of rounds, the same on all ranks. A rank gets one extent in each.
            room: returns memory for an extent.
            own: whether an extent that lies in one tensor may be the memory of that tensor.

        Yields:
            In each round the number of an extent and its bytes, or None if this rank has no more.
            The bytes lie in memory of `room`, or in a tensor.
        """
        me, size, run = self.replica.rank, self.replica.size, runs[self.replica.rank]
        asked: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number in self.routes.asked:
            rank = int(self.routes.keepers[number])
            asked[number - runs[rank][0]].append((rank, number))
        for turn in range(rounds):
            found = None
            # Each rank first posts the receives of this round, so no sender waits for ever.
            expected: list[Expected] = []
            if turn < len(run):
                expected = self._expect(run[turn])
                found = run[turn], self._put_together(run[turn], room, own=own)
            for rank, number in sorted(asked[turn], key=lambda to: (to[0] - me) % size):
                pieces = self._joined(number)
                self._outgoing.send(rank, total(pieces), partial(self.parts.pack, pieces))
            for request, packed, received in expected:
                assert found is not None
                with self.replica.waiting(WAITING):
                    request.Wait()
                unpack_pieces(packed, received, found[1])
            # MPI may send only while this rank calls it, and the caller's write takes long.
            self._outgoing.finish()
            yield found

    def _expect(self, number: int) -> list[Expected]:
        """Begin to receive the pieces that other ranks have of an extent."""
        comm, due = self.replica.comm, {}
        for rank in self.routes.holders.get(number, ()):
            pieces = self.routes.pieces(rank, number)
            if nbytes := total(pieces):
                due[rank] = pieces, nbytes
        into, found, begin = self._into(sum(nbytes for _, nbytes in due.values())), [], 0
        for rank, (pieces, nbytes) in due.items():
            assert comm is not None
            packed = into[begin : begin + nbytes]
            found.append((comm.Irecv(packed, rank), packed, pieces))
            begin += nbytes
        return found

    def _put_together(self, number: int, room: Room, *, own: bool) -> Bytes:
        """An extent, filled with this rank's pieces and the state."""
        pieces, nbytes = self._joined(number), self.layout.size(number)
        extent = self.parts.memory(pieces, nbytes) if own else None
        if extent is None:
            extent = room(nbytes)
            self.parts.gather(pieces, extent)
            begin, end = self.layout.extent(number)
            state = self.layout.entries[-2].begin
            if len(self._state) and end > state:
                first = max(begin, state)
                extent[first - begin :] = self._state[first - state : end - state]
        return extent

    def hand_out(self, read: Mapping[int, int], extent: Bytes | None) -> Bytes:
        """Hand the pieces of extents to the ranks that hold them. Collective over the replica.

        Args:
            read: the number of the extent that a rank has, by rank; at most MESSAGES_AT_ONCE.
            extent: the bytes of this rank's extent, if it has one.

        Returns:
            The bytes of this rank's pieces of these extents, one behind the other, in the order of
            `read`.
        """
        me, comm = self.replica.rank, self.replica.comm
        due = {rank: total(self.mine(number)) for rank, number in read.items()}
        into, begin, requests = self._into(sum(due.values())), 0, []
        for rank, nbytes in due.items():
            packed = into[begin : begin + nbytes]
            begin += nbytes
            if rank == me:
                assert extent is not None
                pack(extent, self.mine(read[me]), packed)
            elif nbytes:
                assert comm is not None
                requests.append(comm.Irecv(packed, rank))
        for rank in self.routes.holders.get(read[me], ()) if me in read else ():
            assert extent is not None
            pieces = self.routes.pieces(rank, read[me])
            self._outgoing.send(rank, total(pieces), partial(pack, extent, pieces))
        with self.replica.waiting(WAITING):
            for request in requests:
                request.Wait()
        self._outgoing.finish()
        return into
