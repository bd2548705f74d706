"""Agreement: an error on one rank is raised on all ranks, and equal values are checked.

MPI jobs hang if one rank leaves by an exception while the others enter a collective. Therefore each
step that can fail on one rank alone runs inside `agreed`, without collectives in it. At its end the
ranks exchange their outcomes, and all of them raise the same error or none does.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from hpc_train import log
from hpc_train.errors import (
    HpcTrainError,
    RankError,
    UserError,
    error_in_words,
    error_text,
    file_error,
)
from hpc_train.mpi.group import AGREEMENT, Group

T = TypeVar("T")
NAP = 5e-3  # seconds between two looks of a rank that sleeps while others are measured
FAILED = 1 << 32  # a failing rank brings a number above this to an agreement

logger = logging.getLogger(__name__)


@contextmanager
def agreed(group: Group, what: str = AGREEMENT) -> Iterator[None]:
    """Run a block that may fail on some ranks; all ranks of the group fail or none does.

    Collective. The block itself must not call a collective.

    Args:
        group: the ranks that agree.
        what: names the agreement, for the message if a rank does not come.

    Raises:
        HpcTrainError: the failing rank's error, of the same class on every rank, naming the rank
            and its host. If its class cannot be made from a cause and a remedy, or cannot be
            pickled, the nearest base class that can is raised. An error about a file becomes what
            `file_error` makes of it, if anything, and other exceptions become a RankError.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # the other ranks must hear of any error
        failure = error
    settle(group, failure, what=what)


def settle(group: Group, failure: Exception | None, number: int = 0, what: str = AGREEMENT) -> int:
    """Raise an error on all ranks if any rank brings a failure. Collective: one small Allreduce.

    Args:
        group: the ranks that agree.
        failure: this rank's error, if it has failed.
        number: a further number to agree on, from 0 to FAILED - 1.
        what: names the agreement, for the message if a rank does not come.

    Returns:
        The largest of the ranks' numbers.

    Raises:
        HpcTrainError: as `agreed`. If several ranks fail, it is the error of the lowest one.
    """
    if group.comm is None:
        if failure is not None:
            raise failure
        return number
    # The lowest failing rank brings the largest number, so its error is the one that is raised.
    outcome = group.largest(number if failure is None else FAILED + group.size - group.rank, what)
    if outcome < FAILED:
        return outcome
    first = group.size - (outcome - FAILED)
    failure = failure and (file_error(failure) or failure)
    if failure is not None and not isinstance(failure, HpcTrainError):
        logger.error("failed on this rank", exc_info=failure)
    mine = _described(group, failure) if group.rank == first else None
    with group.waiting(f"the error of rank {first}"):
        told = group.comm.bcast(mine, root=first)
    told.agreed, told.agreed_ranks = True, group.size
    raise told from failure


def _described(group: Group, failure: Exception | None) -> HpcTrainError:
    """The failing rank's error, in the form in which all ranks raise it."""
    # Nothing here may raise, because the other ranks wait for the result.
    where = f"rank {group.rank} ({group.host})"
    if isinstance(failure, HpcTrainError):
        cause, remedy = error_text(failure.cause), error_text(failure.remedy)
        if not failure.agreed_ranks:  # else some of these ranks have agreed, and it names one
            cause = f"{where}: {cause}"
        # A user's own subclass may take other arguments, or be changed by pickling.
        for kind in type(failure).__mro__[: type(failure).__mro__.index(HpcTrainError)]:
            with suppress(Exception):
                error: HpcTrainError = pickle.loads(pickle.dumps(kind(cause, remedy)))
                if (error.cause, error.remedy) == (cause, remedy):
                    return error
        return HpcTrainError(cause, remedy)
    assert failure is not None
    return RankError(
        f"{where}: {error_in_words(failure)}", f"its {log.destination()} has the traceback"
    )


def from_first(group: Group, make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on all ranks. Collective.

    Raises:
        HpcTrainError: `make` has failed; on all ranks, as `agreed`.
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
        what: names the value, for the message.
        value: any text; its hash is compared.
        remedy: tells the user how to make it equal.

    Raises:
        UserError: the value differs; the message names a rank and host of each side.
    """
    if group.comm is None:
        return
    value_bytes = value.encode(errors="surrogatepass")  # of a path with bytes that are no text
    digest = hashlib.blake2b(value_bytes, digest_size=16).digest()
    with group.waiting(f"a comparison of {what}"):
        first = group.comm.bcast((digest, group.host))
    differing: Exception | None = None
    if first[0] != digest:
        differing = UserError(f"{what} differs from that of rank 0 ({first[1]})", remedy)
    settle(group, differing)


def all_arrive(group: Group, seconds: float) -> bool:
    """Whether all ranks of the group call this within `seconds` seconds.

    A rank that has failed outside `agreed` calls it. If all ranks have failed, they can leave
    together; otherwise the job has to be aborted. After False the communicator cannot be used any
    more.
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


def meet(group: Group) -> None:
    """Wait for all ranks, asleep: some of them may be measured on this rank's cores. Collective."""
    if group.comm is None:
        return
    with group.waiting("a measurement of the other ranks"):
        everyone = group.comm.Ibarrier()
        while not everyone.Test():
            time.sleep(NAP)
