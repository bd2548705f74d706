"""A set of ranks that communicate, and the communicator that is theirs alone."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import or_
from typing import TYPE_CHECKING, TypeVar

from hpc_train.mpi.watch import Watch

if TYPE_CHECKING:
    from mpi4py import MPI

K = TypeVar("K")
T = TypeVar("T")

AGREEMENT = "an agreement"


@dataclass(frozen=True)
class Group:
    """Ranks 0 to size - 1 of one communicator.

    Args:
        rank: this process's place in the group.
        size: number of ranks.
        comm: a duplicated communicator, owned by this group; None for a process alone, for which
            MPI is never started.
        waiting: `with group.waiting("the sum of a bucket"):` around every call that waits for
            other ranks.
    """

    rank: int = 0
    size: int = 1
    comm: MPI.Intracomm | None = None
    waiting: Watch = field(default_factory=Watch, repr=False, compare=False)

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> Group:
        """The group of a communicator's ranks, on a duplicate of it. Collective."""
        return cls(comm.rank, comm.size, comm.Dup())

    def split(self, color: int, key: int) -> Group:
        """The ranks that give the same color, ordered by key. Collective over this group.

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
        """The same ranks on a communicator of its own. Collective."""
        comm = self.comm.Dup() if self.comm else None
        return Group(self.rank, self.size, comm, self.waiting)

    @property
    def host(self) -> str:
        """This process's host name."""
        return socket.gethostname()

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on all ranks; it runs on rank 0 only. Collective.

        `make` must not raise: wrap what can fail in `agreement.from_first`.
        """
        value = make() if self.rank == 0 else None
        with self.waiting("a broadcast from rank 0"):
            return self.comm.bcast(value) if self.comm else value  # type: ignore[return-value]

    def gathered(self, value: T, what: str = "what all ranks have") -> list[T]:
        """The values of all ranks, by rank. Collective.

        Args:
            value: this rank's; it is pickled.
            what: they are, in words, for the message if a rank does not come.
        """
        if self.comm is None:
            return [value]
        with self.waiting(what):
            return self.comm.allgather(value)

    def united(self, values: Mapping[K, T], what: str = "what all ranks have") -> dict[K, T]:
        """All ranks' values by key; of several for one key it is any of them. Collective.

        It goes through a tree, so no message is longer than the result.

        Args:
            values: this rank's; pickled.
            what: they are, in words, for the message if a rank does not come.
        """
        if self.comm is None:
            return dict(values)
        with self.waiting(what):
            found: dict[K, T] = self.comm.allreduce(dict(values), op=or_)
        return found

    def same(self, data: bytes, what: str = AGREEMENT) -> bool:
        """Whether all ranks bring the same bytes: 8, or a multiple of it. Collective."""
        if self.comm is None:
            return True
        from mpi4py import MPI  # a group with a communicator has MPI

        mine = array("q", data)
        found = array("q", [*mine, *(~number for number in mine)])
        with self.waiting(what):
            self.comm.Allreduce(MPI.IN_PLACE, found, op=MPI.MAX)
        largest, smallest = found[: len(mine)], [~number for number in found[len(mine) :]]
        return [*largest] == smallest

    def largest(self, number: int, what: str = AGREEMENT) -> int:
        """The largest of the ranks' integers, of 64 bits. Collective.

        Args:
            number: this rank's.
            what: is agreed on, in words, for the message if a rank does not come.
        """
        return self._combined("MAX", number, what)

    def smallest(self, number: int) -> int:
        """The smallest of the ranks' integers, of 64 bits. Collective."""
        return self._combined("MIN", number, AGREEMENT)

    def total(self, number: int) -> int:
        """The sum of the ranks' integers, of 64 bits. Collective."""
        return self._combined("SUM", number, AGREEMENT)

    def _combined(self, operation: str, number: int, what: str) -> int:
        if self.comm is None:
            return number
        from mpi4py import MPI  # a group with a communicator has MPI

        result = array("q", [number])
        with self.waiting(what):
            self.comm.Allreduce(MPI.IN_PLACE, result, op=getattr(MPI, operation))
        return result[0]

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self.comm:
            with self.waiting("a barrier"):
                self.comm.Barrier()

    def close(self) -> None:
        """Free the communicator. Collective."""
        if self.comm:
            self.comm.Free()
