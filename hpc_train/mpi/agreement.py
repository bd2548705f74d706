"""Agreement: what fails on one rank is raised on all, and what must be equal is checked to be.

A rank that leaves by an exception while the others enter a collective is how MPI jobs hang. Each
step that can fail on one rank alone therefore runs inside `agreed`, without collectives in it; at
its end the ranks exchange their outcome, and all of them raise the same error or none does.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from hpc_train.errors import HpcTrainError, RankError, UserError
from hpc_train.mpi.group import Group

T = TypeVar("T")
FAILED = 1 << 32  # added to what a failing rank brings to an agreement

logger = logging.getLogger(__name__)


@contextmanager
def agreed(group: Group) -> Iterator[None]:
    """Run a block that may fail on some ranks; all ranks of the group fail or none does.

    Collective. The block must hold no collective of its own.

    Raises:
        HpcTrainError: the failing rank's error, of the same class on every rank, naming the rank
            and its host. Of a subclass that cannot be made from a cause and a remedy, or not be
            pickled, the nearest base that can be. Exceptions of other kinds become a RankError.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
        failure = error
    settle(group, failure)


def settle(
    group: Group, failure: Exception | None, number: int = 0, what: str = "an agreement"
) -> int:
    """Raise on all ranks if any rank brings a failure; else the largest of their numbers.

    Collective, by one small Allreduce.

    Args:
        group: the ranks that agree.
        failure: this rank's, if it has failed.
        number: from 0 to below FAILED; what else the ranks have to agree on.
        what: is agreed on, in words, for the message if a rank does not come.

    Raises:
        HpcTrainError: as `agreed`; of several failing ranks the lowest one's.
    """
    if group.comm is None:
        if failure is not None:
            raise failure
        return number
    # Of the failing ranks the lowest is to speak, so the largest of these numbers is it.
    outcome = group.largest(number if failure is None else FAILED + group.size - group.rank, what)
    if outcome < FAILED:
        return outcome
    first = group.size - (outcome - FAILED)
    if failure is not None and not isinstance(failure, HpcTrainError):
        logger.error("failed on this rank", exc_info=failure)
    mine = _described(group, failure) if group.rank == first else None
    with group.waiting(f"the error of rank {first}"):
        told = group.comm.bcast(mine, root=first)
    told.agreed = True
    raise told from failure


def _described(group: Group, failure: Exception | None) -> HpcTrainError:
    """The failing rank's error as the other ranks raise it.

    Nothing in it may raise: the other ranks wait for what it returns.
    """
    where = f"rank {group.rank} ({group.host})"
    if isinstance(failure, HpcTrainError):
        cause, remedy = f"{where}: {_text(failure.cause)}", _text(failure.remedy)
        # A subclass of somebody else's may take other arguments, or not survive the way.
        for kind in type(failure).__mro__[: type(failure).__mro__.index(HpcTrainError)]:
            with suppress(Exception):
                error: HpcTrainError = pickle.loads(pickle.dumps(kind(cause, remedy)))
                if (error.cause, error.remedy) == (cause, remedy):
                    return error
        return HpcTrainError(cause, remedy)
    text = f"{where}: {type(failure).__name__}: {_text(failure)}"
    return RankError(text, "its log has the traceback")


def _text(of: object) -> str:
    try:
        return str(of)
    except Exception as error:  # noqa: BLE001  # in somebody's __str__
        return f"({type(error).__name__} in its message)"


def from_first(group: Group, make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on all ranks; if it raises there, all raise. Collective.

    Raises:
        HpcTrainError: as `agreed`.
    """
    value: T | None = None
    with agreed(group):
        if group.rank == 0:
            value = make()
    return group.from_first(lambda: value)  # type: ignore[return-value]


def same(group: Group, what: str, value: str, remedy: str) -> None:
    """Check that all ranks bring the same value. Collective.

    Args:
        group: the ranks that compare.
        what: what the value stands for, in words for the message.
        value: any text, compared by its hash.
        remedy: how to make it equal.

    Raises:
        UserError: the value differs; the message names a rank and host of each side.
    """
    if group.comm is None:
        return
    digest = hashlib.blake2b(value.encode(), digest_size=16).digest()
    with group.waiting(f"a comparison of {what}"):
        first = group.comm.bcast((digest, group.host))
    differing: Exception | None = None
    if first[0] != digest:
        differing = UserError(f"{what} differs from that of rank 0 ({first[1]})", remedy)
    settle(group, differing)


def all_arrive(group: Group, seconds: float) -> bool:
    """Whether all ranks of the group call this within `seconds` seconds.

    For a rank that has failed outside `agreed`: if all have, they can leave together; if not, the
    job has to be ended. After False the communicator is of no further use.
    """
    if group.comm is None:
        return True
    limit = time.monotonic() + seconds
    request = group.comm.Ibarrier()
    while not request.Test():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True
