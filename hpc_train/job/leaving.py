"""How a loop of the user's own is left before its end, and what the ranks agree on then."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from hpc_train.errors import Stopped, UserError
from hpc_train.mpi.group import Group
from hpc_train.mpi.watchdog import named

T = TypeVar("T")


class Held(Iterator[T]):
    """An iterator that tells when nobody has it any more.

    Args:
        source: where the items come from; it lives on.
        dropped: is called with that then.
    """

    def __init__(
        self, source: Generator[T, Any, Any], dropped: Callable[[Generator[T, Any, Any]], None]
    ) -> None:
        self._source, self._dropped = source, dropped

    def __next__(self) -> T:
        return next(self._source)

    def __del__(self) -> None:
        self._dropped(self._source)


def leave_together(group: Group, error: BaseException | None) -> bool:
    """Whether all ranks leave a block by this error, or none; another may be of one rank alone."""
    together = error is None or isinstance(error, Stopped) or getattr(error, "agreed", False)
    return together or group.comm is None


def check_left_by_all(group: Group, *, left: bool) -> None:
    """Raise, unless all ranks have left the loop. Collective, once one of them has.

    Raises:
        UserError: on all ranks, naming those that have.
    """
    found = group.gathered((left, group.host), "who has left the loop")
    ranks = [rank for rank, (gone, _) in enumerate(found) if gone]
    if len(ranks) == group.size:
        return
    error = UserError(
        f"{named(ranks, [host for _, host in found])} left the loop before its end, the other "
        "ranks did not",
        "let all ranks leave it, or call loop.stop() on any of them",
    )
    error.agreed = True
    raise error
