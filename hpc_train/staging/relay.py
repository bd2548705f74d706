"""Passes a stream from node to node: reading, sending and writing overlap.

A node sends each chunk on as soon as it has it, while it writes it to its disk. The first node
sends each chunk once, to one node. What the others do depends on their number:

- In a chain each node sends to the next one. No link carries more than the stream, which is the
  least there can be. The last node gets the first chunk when all others have passed it on.
- In a tree each node but the first sends to two others. A chunk reaches all nodes after about
  log2(nodes) steps, but a node's link carries the stream twice.

With t for the time of a chunk on a link, the chain takes (chunks + nodes - 2) t and the tree about
(2 chunks + 2 log2(nodes)) t. So the chain is taken while there are no more nodes than chunks.

Pipelined chains and trees: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35, 2009.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import xxhash

from hpc_train.mpi.group import Group
from hpc_train.staging.listing import READERS

WRITERS = 4  # threads
WINDOW = 32  # chunks that a node holds at most
# Chunks that are sent at the same time. MPI sends them side by side: with more of them, the first
# one arrives later, and so does each node's last one.
SENDS = 4
# Seconds to sleep; who waits by MPI's own means takes a core that the writers may need.
SHORTEST_NAP, LONGEST_NAP = 2e-5, 1e-3
PROGRESS_EVERY = 10.0  # seconds between two lines of progress
_END = object()

logger = logging.getLogger(__name__)


class Neighbours(NamedTuple):
    """The node from which a node gets the stream, and those to which it sends it.

    `before` is None on the first node.
    """

    before: int | None
    after: tuple[int, ...]


def neighbours(rank: int, nodes: int, chunks: int) -> Neighbours:
    """A node's place in the chain, or in the tree if there are more nodes than chunks.

    Subtrees are runs of ranks, which launchers deal out along the network's own tree.
    """
    if nodes <= chunks:
        before = rank - 1 if rank else None
        return Neighbours(before, (rank + 1,) if rank + 1 < nodes else ())
    if rank == 0:
        return Neighbours(None, (1,) if nodes > 1 else ())
    before, begin, end = 0, 1, nodes  # the subtree of `begin` has the ranks from begin to end - 1
    while True:
        first, second = begin + 1, (begin + 2 + end) // 2
        if rank == begin:
            return Neighbours(before, tuple(n for n in {first: 0, second: 0} if n < end))
        before = begin
        begin, end = (first, second) if rank < second else (second, end)


class Relay:
    """One node's part in passing on a stream.

    Args:
        cross: one rank of each node.
        sizes: bytes of each chunk; none is empty.
        read: reads a chunk, given its number, into memory. The first node calls it, in several
            threads at a time.
        write: writes a chunk from memory. Each node calls it, in several threads at a time.

    Attributes:
        error: why this node could not read or write; None if it could.
        complete: whether all chunks have come here.
    """

    def __init__(
        self,
        cross: Group,
        sizes: Sequence[int],
        read: Callable[[int, memoryview], None],
        write: Callable[[int, memoryview], None],
    ) -> None:
        self.cross, self.sizes, self.read, self.write = cross, sizes, read, write
        self.before, self.after = neighbours(cross.rank, cross.size, len(sizes))
        self.error: BaseException | None = None
        self.complete = True
        self._hash = xxhash.xxh3_128()
        self._passed = 0  # chunks that have come, and are on their way to others
        self._sending = 0  # chunks of these that have not arrived there yet
        self._begin = self._told = time.monotonic()

    def run(self) -> str:
        """Pass on all chunks. Collective over the nodes.

        A node that cannot write still passes on what comes, so nobody waits for it. If the first
        node cannot read, it sends all further chunks empty.

        Returns:
            The hash of all bytes that have come here.
        """
        slots = [memoryview(bytearray(max(self.sizes, default=0))) for _ in self.sizes[:WINDOW]]
        held: deque[Iterator[None]] = deque()
        started, seen, since = 0, (-1, 0), 0.0
        with ThreadPoolExecutor(READERS) as readers, ThreadPoolExecutor(WRITERS) as writers:
            while started < len(self.sizes) or held:
                while started < len(self.sizes) and len(held) < WINDOW:
                    memory = slots[started % WINDOW][: self.sizes[started]]
                    held.append(self._pass_on(started, memory, readers, writers))
                    next(held[-1], _END)
                    started += 1
                for number, chunk in enumerate(held, started - len(held)):
                    if number > self._passed:  # it has not come before the one that is awaited
                        break
                    next(chunk, _END)
                while held and next(held[0], _END) is _END:
                    held.popleft()
                now = time.monotonic()
                if seen != (started, self._passed):
                    seen, since = (started, self._passed), now
                time.sleep(min(LONGEST_NAP, max(SHORTEST_NAP, (now - since) / 2)))
        return self._hash.hexdigest()

    def _pass_on(
        self,
        number: int,
        memory: memoryview,
        readers: ThreadPoolExecutor,
        writers: ThreadPoolExecutor,
    ) -> Iterator[None]:
        """Get a chunk, send it on and write it. It yields wherever it would have to wait."""
        if self.before is None:
            coming = self._read(number, memory, readers)
        else:
            coming = self._receive(memory, self.before)
        memory = yield from coming
        while self._passed < number or self._sending == SENDS:  # chunks leave in their order
            yield
        self._passed += 1
        self._sending += 1
        self.complete = self.complete and len(memory) > 0
        if not self.complete:
            memory = memory[:0]
        self._hash.update(memory)
        comm: Any = self.cross.comm
        sends = [comm.Isend(memory, node) for node in self.after]
        writes = self.complete and self.error is None
        writing = writers.submit(self.write, number, memory) if writes else None
        while not all(send.Test() for send in sends):
            yield
        self._sending -= 1
        if writing is not None:
            while not writing.done():
                yield
            self.error = self.error or writing.exception()

    def _read(
        self, number: int, memory: memoryview, readers: ThreadPoolExecutor
    ) -> Generator[None, None, memoryview]:
        """Read a chunk; an empty one if that fails."""
        self._tell()
        reading = readers.submit(self.read, number, memory)
        while not reading.done():
            yield
        failed = reading.exception()
        self.error = self.error or failed
        return memory[:0] if failed else memory

    def _receive(self, memory: memoryview, before: int) -> Generator[None, None, memoryview]:
        """Get a chunk from another node; an empty one if the first node could not read it."""
        from mpi4py import MPI  # it is running, because there are several nodes

        comm: Any = self.cross.comm
        status = MPI.Status()
        request = comm.Irecv(memory, before)
        while not request.Test(status):
            yield
        return memory[: status.Get_count(MPI.BYTE)]

    def _tell(self) -> None:
        """Log every few seconds how much of the stream has been read."""
        now = time.monotonic()
        if now - self._told < PROGRESS_EVERY:
            return
        self._told = now
        share = self._passed / len(self.sizes)
        speed = sum(self.sizes[: self._passed]) / (now - self._begin)
        text = "%.0f %% of the files sent, %.0f MB/s, %.0f s left"
        logger.info(text, 100 * share, speed / 1e6, (now - self._begin) * (1 / share - 1))
