"""How ranks leave a user's own loop before its end, and what they agree on then."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from hpc_train.errors import HpcTrainError, Stopped, UserError
from hpc_train.mpi.group import Group
from hpc_train.mpi.watchdog import named

T = TypeVar("T")


class LeftBySome(UserError):
    """Some ranks have left a loop and others have not; raised on all ranks."""


class Held(Iterator[T]):
    """An iterator that calls a function once nobody refers to it any more.

    Args:
        source: the generator of its items, which lives on.
        dropped: the function; its argument is the source.
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
    """Whether all ranks leave a block by this error. Other errors may be on one rank alone."""
    if error is None or isinstance(error, Stopped) or group.comm is None:
        return True
    return isinstance(error, HpcTrainError) and error.agreed_by(group.size)


def check_left_by_all(group: Group, *, left: bool) -> None:
    """Raise an error unless all ranks have left the loop. Collective, once one rank has left it.

    Raises:
        LeftBySome: some ranks have left it and others have not; raised on all ranks.
    """
    found = group.gathered((left, group.host), "who has left the loop")
    ranks = [rank for rank, (gone, _) in enumerate(found) if gone]
    if len(ranks) == group.size:
        return
    error = LeftBySome(
        f"{named(ranks, [host for _, host in found])} left the loop before its end, but the "
        "other ranks did not",
        "let all ranks leave it, or call loop.stop() on any rank",
    )
    error.agreed = True
    raise error
