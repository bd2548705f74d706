"""Compares the clocks of a job's hosts, and brings times by any of them to the clock of rank 0.

Two clocks are compared by questions and answers, and the fastest exchange counts: Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989; NTP's clock filter (RFC 5905,
section 10) selects alike. Its error is at most half of the time that the exchange took.

Only one rank of each node takes part, because the processes of a host share its clock. These ranks
form a tree, in which each compares its clock with one that was compared before it: so N hosts need
log2(N) rounds, as in Hunold and Carpen-Amarie, "Hierarchical clock synchronization in MPI", CLUSTER
2018. Errors of the rounds add up.

Clocks also drift. One comparison before the recording and one after it give the drift.
In between, the offset is interpolated, so it is as exact as the comparisons, however short or long
the record is.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from hpc_train.mpi.group import Group

DRIFT = 1e-4  # most seconds per second between two clocks: crystals keep within 50 ppm
LEAST, MOST = 32, 256  # exchanges of a comparison
SWIFT = 100e-6  # seconds; after LEAST exchanges, one that took no longer ends the comparison
COMPARES = "the comparison of the hosts' clocks"


class ClockExchange(NamedTuple):
    """A question and its answer.

    Args:
        sent: when the question was sent, in seconds by the asker's clock.
        answered: when the other one answered, by the reference clock.
        received: when the answer came, by the asker's clock.
    """

    sent: float
    answered: float
    received: float

    @property
    def delay(self) -> float:
        """Seconds that the exchange took."""
        return self.received - self.sent


class ClockReading(NamedTuple):
    """One moment by two clocks.

    Args:
        own: seconds by this process's clock.
        reference: seconds by the clock of rank 0.
        error: the most seconds that `reference` can be wrong by.
    """

    own: float
    reference: float
    error: float = 0.0

    @property
    def offset(self) -> float:
        """Seconds that the reference clock is ahead."""
        return self.reference - self.own


def reading_of(exchanges: Sequence[ClockExchange]) -> ClockReading:
    """The reading that the fastest of some exchanges gives."""
    best = min(exchanges, key=lambda one: one.delay)
    return ClockReading((best.sent + best.received) / 2, best.answered, best.delay / 2)


class CommonTime:
    """Turns times by this process's clock into times by the clock of rank 0.

    Args:
        begin: a reading before the times.
        end: a reading after them.
    """

    def __init__(self, begin: ClockReading, end: ClockReading) -> None:
        self.begin, self.end = begin, end
        self._span = max(end.own - begin.own, 1e-9)

    @property
    def drift(self) -> float:
        """Seconds per second that the reference clock gains on this one."""
        return (self.end.offset - self.begin.offset) / self._span

    @property
    def error(self) -> float:
        """The most seconds that a time between the readings can be wrong by."""
        return max(self.begin.error, self.end.error)

    def __call__(self, own: float) -> float:
        """A time by the clock of rank 0, in seconds.

        Outside of the two readings the nearer one's offset holds: the errors of two readings that
        are close together would grow there with every second.
        """
        share = min(max((own - self.begin.own) / self._span, 0.0), 1.0)
        return own + self.begin.offset + share * (self.end.offset - self.begin.offset)


class ClockComparison:
    """Compares `time.perf_counter` of each process with that of rank 0.

    Collective to make.

    Args:
        world: all ranks of the job.
        node: the ranks that share this process's clock.
    """

    def __init__(self, world: Group, node: Group) -> None:
        self._node, self._waiting = node, world.waiting
        with world.waiting(COMPARES):
            # The second half, of the ranks that take no part, is used for nothing.
            self._leaders = world.split(min(node.rank, 1), world.rank)

    def read(self) -> ClockReading:
        """Compare the clocks now. Collective."""
        with self._waiting(COMPARES):
            mine = self._compared() if self._node.rank == 0 else None
            if self._node.comm is not None:
                mine = self._node.comm.bcast(mine)
        assert mine is not None  # the first rank of the node has it
        return mine

    def _compared(self) -> ClockReading:
        now = time.perf_counter()
        mine = ClockReading(now, now)  # rank 0's; all others ask before they are asked
        rank, size = self._leaders.rank, self._leaders.size
        distance = 1 << max(size - 1, 0).bit_length()
        while distance := distance // 2:
            if rank % (2 * distance) == distance:
                mine = self._ask(rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < size:
                self._answer(rank + distance, mine)
        return mine

    def _ask(self, other: int) -> ClockReading:
        comm = self._leaders.comm
        assert comm is not None
        found: list[ClockExchange] = []
        more, answer = array("d", [1.0]), array("d", [0.0, 0.0])
        best = SWIFT + 1
        while len(found) < LEAST or (best > SWIFT and len(found) < MOST):
            sent = time.perf_counter()
            comm.Send(more, other)
            comm.Recv(answer, other)
            found.append(ClockExchange(sent, answer[0], time.perf_counter()))
            best = min(best, found[-1].delay)
        comm.Send(array("d", [0.0]), other)
        mine = reading_of(found)
        return mine._replace(error=mine.error + answer[1])

    def _answer(self, other: int, mine: ClockReading) -> None:
        comm = self._leaders.comm
        assert comm is not None
        more, answer = array("d", [1.0]), array("d", [0.0, 0.0])
        while True:
            comm.Recv(more, other)
            if not more[0]:
                return
            now = time.perf_counter()
            answer[0] = now + mine.offset
            # A reading grows old. Rank 0's clock is the reference itself.
            answer[1] = mine.error + (DRIFT * (now - mine.own) if self._leaders.rank else 0.0)
            comm.Send(answer, other)

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._leaders.close()
