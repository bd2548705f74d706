"""A set of ranks that communicate, with a communicator that only they use."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import or_
from typing import TYPE_CHECKING, TypeVar

from hpc_train.errors import UserError
from hpc_train.mpi.idle import Idle
from hpc_train.mpi.traffic import LinkKind
from hpc_train.mpi.watch import Watch

if TYPE_CHECKING:
    from mpi4py import MPI

K = TypeVar("K")
T = TypeVar("T")

# For messages: "rank 3 has waited 60 s for ..."
AGREEMENT = "an agreement"
GATHER = "a value from each rank"
MEETING = 32_000  # tag of messages, in the range that every MPI has


@dataclass(frozen=True)
class Group:
    """Ranks 0 to size - 1 of one communicator.

    Args:
        rank: this process's number in the group.
        size: number of ranks.
        comm: a duplicated communicator that this group owns; None for a process alone, which never
            starts MPI.
        waiting: records waits for the watchdog. Every call that waits for other ranks is inside of
            `with group.waiting("the sum of a bucket"):`.
    """

    rank: int = 0
    size: int = 1
    comm: MPI.Intracomm | None = None
    waiting: Watch = field(default_factory=Watch, repr=False, compare=False)

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> Group:
        """The group of a communicator's ranks, with a duplicate of it. Collective."""
        return cls(comm.rank, comm.size, comm.Dup())

    def split(self, color: int, key: int) -> Group:
        """The group of the ranks that give the same color, ordered by key. Collective.

        Colors are 0 or larger. A group of one rank has no communicator.
        """
        if self.comm is None:
            return Group(waiting=self.waiting)
        comm: MPI.Intracomm = self.comm.Split(color, key)  # type: ignore[assignment]
        if comm.size > 1:
            return Group(comm.rank, comm.size, comm, self.waiting)
        comm.Free()
        return Group(waiting=self.waiting)

    def duplicate(self) -> Group:
        """A group of the same ranks with another communicator of its own. Collective."""
        comm = self.comm.Dup() if self.comm else None
        return Group(self.rank, self.size, comm, self.waiting)

    @property
    def host(self) -> str:
        """This process's host name."""
        return socket.gethostname()

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 only and return its result on all ranks. Collective.

        `make` must not raise. If it can fail, use `agreement.from_first`.
        """
        value = make() if self.rank == 0 else None
        with self.waiting("a broadcast from rank 0"):
            self._meet()
            return self.comm.bcast(value) if self.comm else value  # type: ignore[return-value]

    def gathered(self, value: T, what: str = GATHER) -> list[T]:
        """The values of all ranks, by rank. Collective.

        Args:
            value: this rank's value; it is pickled.
            what: names the values, for the message if a rank does not come.
        """
        if self.comm is None:
            return [value]
        with self.waiting(what):
            self._meet()
            return self.comm.allgather(value)

    def gathered_by_first(self, value: T, what: str = GATHER) -> list[T]:
        """The values of all ranks, by rank, on rank 0; an empty list on the others. Collective.

        Args:
            value: this rank's value; it is pickled.
            what: names the values, for the message if a rank does not come.
        """
        if self.comm is None:
            return [value]
        with self.waiting(what):
            self._meet()
            return self.comm.gather(value) or []

    def united(self, values: Mapping[K, T], what: str = GATHER) -> dict[K, T]:
        """The union of all ranks' mappings. Collective.

        If several ranks have a value for one key, it is any of theirs. The mappings are joined
        along a tree, so no message is longer than the result.

        Args:
            values: this rank's mapping; it is pickled.
            what: names the values, for the message if a rank does not come.
        """
        if self.comm is None:
            return dict(values)
        with self.waiting(what):
            self._meet()
            found: dict[K, T] = self.comm.allreduce(dict(values), op=or_)
        return found

    def same(self, data: bytes, what: str = AGREEMENT) -> bool:
        """Whether all ranks bring the same bytes. Collective.

        Args:
            data: this rank's bytes; their length is a multiple of 8.
            what: names the values, for the message if a rank does not come.
        """
        if self.comm is None:
            return True
        from mpi4py import MPI  # it is running, because the group has a communicator

        mine = array("q", data)
        # ~x reverses the order of integers, so one MAX gives both the largest and the smallest.
        found = array("q", [*mine, *(~number for number in mine)])
        with self.waiting(what):
            self._meet()
            self.comm.Allreduce(MPI.IN_PLACE, found, op=MPI.MAX)
        largest, smallest = found[: len(mine)], [~number for number in found[len(mine) :]]
        return [*largest] == smallest

    def largest(self, number: int, what: str = AGREEMENT) -> int:
        """The largest of the ranks' integers, of 64 bits. Collective.

        Args:
            number: this rank's number.
            what: names the agreement, for the message if a rank does not come.
        """
        return self._combined("MAX", number, what)

    def largest_each(self, numbers: Sequence[int]) -> list[int]:
        """The largest of the ranks' integers, of 64 bits, at each place. Collective."""
        return self._combined_each("MAX", numbers, AGREEMENT)

    def smallest(self, number: int) -> int:
        """The smallest of the ranks' integers, of 64 bits. Collective."""
        return self._combined("MIN", number, AGREEMENT)

    def total(self, number: int) -> int:
        """The sum of the ranks' integers, of 64 bits. Collective."""
        return self._combined("SUM", number, AGREEMENT)

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """The sums of the ranks' integers, of 64 bits, each over all ranks. Collective."""
        return self._combined_each("SUM", numbers, AGREEMENT)

    def summed(self, numbers: Sequence[int]) -> list[int]:
        """The sums of the ranks' integers, of any size, each over all ranks. Collective."""
        if self.comm is None:
            return [*numbers]
        with self.waiting("the sums of all ranks"):
            self._meet()
            found: list[int] = self.comm.allreduce([*numbers], op=_each_added)
        return found

    def _combined(self, operation: str, number: int, what: str) -> int:
        return self._combined_each(operation, [number], what)[0]

    def _combined_each(self, operation: str, numbers: Sequence[int], what: str) -> list[int]:
        if self.comm is None:
            return [*numbers]
        from mpi4py import MPI  # it is running, because the group has a communicator

        result = array("q", numbers)
        with self.waiting(what):
            self._meet()
            try:
                self.comm.Allreduce(MPI.IN_PLACE, result, op=getattr(MPI, operation))
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                # The other rank is in a sum of more numbers, such as that of a BatchNorm layer.
                raise UserError(
                    f"the ranks took different paths: this one came to {what}, and another one to "
                    "something else",
                    "let all ranks make the same calls, and call model.eval() before one rank "
                    "alone evaluates",
                ) from None
        return [*result]

    def _meet(self) -> None:
        """Wait for all ranks without keeping a core from them, if ranks share cores. Collective.

        MPI only yields the core while it waits. Many schedulers give it back at once, though the
        rank that is waited for needs it. The barrier is Hensgen, Finkel and Manber, "Two algorithms
        for barrier synchronization" (1988). It is none of MPI's, because one of those would match
        that of a rank which has failed (`all_arrive`).
        """
        if self.comm is None or not self.waiting.polite:
            return
        idle, distance = Idle(polite=True), 1
        while distance < self.size:
            before, after = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            come = self.comm.Irecv(bytearray(1), source=before, tag=MEETING)
            told = self.comm.Isend(bytes(1), dest=after, tag=MEETING)
            while not (come.Test() and told.Test()):
                idle.pause()
            distance *= 2

    def link(self) -> LinkKind:
        """Whether the group's ranks communicate inside of one host or across hosts. Collective."""
        return "across" if len(set(self.gathered(self.host))) > 1 else "inside"

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self.comm:
            with self.waiting("a barrier"):
                self._meet()
                self.comm.Barrier()

    def close(self) -> None:
        """Free the communicator. Collective."""
        if self.comm:
            self.comm.Free()


def _each_added(some: Sequence[int], others: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip(some, others, strict=True)]
