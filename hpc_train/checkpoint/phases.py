"""A save as a coroutine: what a rank does by itself is yielded, and between that the ranks agree.

The same coroutine serves a save that the job waits for and one that a thread carries out while the
job trains: the work needs no MPI, and the agreements are made in the main thread, at step
boundaries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

T = TypeVar("T")
Work = Callable[[], Any]
PhaseOutcome = tuple[Any, Exception | None]
Phases = Generator[Work, PhaseOutcome, T]


def agree(group: Group, work: Callable[[], T]) -> Phases[T]:
    """Let each rank do its work; what fails on one rank is raised on all.

    Raises:
        HpcTrainError: as `hpc_train.mpi.agreement.settle`.
    """
    value, failure = yield work
    settle(group, failure)
    result: T = value
    return result


def carry_out(phases: Phases[T]) -> T:
    """Carry out all phases here and now. Collective.

    Raises:
        HpcTrainError: one of them failed.
    """
    try:
        work = next(phases)
        while True:
            work = phases.send(_outcome(work))
    except StopIteration as end:
        result: T = end.value
        return result


def _outcome(work: Work) -> PhaseOutcome:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  # the phase's end raises it, on all ranks
        return None, error


class Flight:
    """Phases whose work a thread does. All ranks make it and call its methods.

    Args:
        phases: the first of them begins at once.
        group: the ranks.

    Raises:
        HpcTrainError: what comes before the first work failed.
    """

    def __init__(self, phases: Phases[None], group: Group) -> None:
        self._phases, self._group = phases, group
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begin = time.monotonic()
        work = next(phases)
        self._done = time.monotonic() - self._begin
        self._work: Future[PhaseOutcome] = self._thread.submit(self._timed, work)

    @property
    def seconds(self) -> float:
        """What it has taken this rank, without the waiting for the end of steps."""
        return self._done + (0.0 if self._work.done() else time.monotonic() - self._begin)

    def _timed(self, work: Work) -> PhaseOutcome:
        self._begin = time.monotonic()
        outcome = _outcome(work)
        self._done += time.monotonic() - self._begin
        return outcome

    def poll(self, *, wait: bool = False) -> bool:
        """Go on if all ranks have done their work; returns whether the last phase has ended.

        Args:
            wait: until then.

        Raises:
            HpcTrainError: a phase failed; that was the end.
        """
        while wait or not self._group.largest(int(not self._work.done())):
            try:
                work = self._phases.send(self._work.result())
            except BaseException as end:
                self._thread.shutdown(wait=False)
                if isinstance(end, StopIteration):
                    return True
                raise
            self._work = self._thread.submit(self._timed, work)
        return False
