"""Operations that wait for other ranks, as coroutines: many can be under way without a thread.

MPI makes no progress by itself. An operation of several rounds (send, wait, add, send on) is
written as a generator. It yields the thing that it waits for: a request of mpi4py, a condition, or
a list of other coroutines. A hook of the backward pass or a thread calls `advance` now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_train.mpi.idle import Idle

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
Wait = Any  # an mpi4py Request, a function that returns whether the wait is over, or Coroutines
Coroutine = Generator[Wait, None, T]


class CoroutineScheduler:
    """Advances coroutines that were started. Two threads must not use it at once."""

    def __init__(self) -> None:
        self._requests: list[MPI.Request] = []
        self._blocked: list[Coroutine[Any]] = []  # each waits for the request of the same index
        self._conditions: list[tuple[Callable[[], bool], Coroutine[Any]]] = []

    @property
    def idle(self) -> bool:
        """Whether all coroutines are done."""
        return not self._blocked and not self._conditions

    def start(self, steps: Coroutine[Any]) -> None:
        """Run a coroutine to its first wait."""
        self._resume(steps)

    def advance(self) -> bool:
        """Let all coroutines go on whose wait is over; returns whether there were any."""
        moved = self._advance_conditions()
        if self._requests:
            moved = self._advance_requests() or moved
        return moved

    def finish(self, *, polite: bool = False) -> None:
        """Advance until all coroutines are done."""
        self._until(lambda: self.idle, polite=polite)

    def complete(self, steps: Coroutine[T], *, polite: bool = False) -> T:
        """Start a coroutine and advance all until it is done; returns its result."""
        results: list[T] = []

        def kept() -> Coroutine[None]:
            results.append((yield from steps))

        self.start(kept())
        self._until(lambda: bool(results), polite=polite)
        return results[0]

    def _until(self, condition: Callable[[], bool], *, polite: bool) -> None:
        pause = Idle(polite=polite)
        while not condition():
            if self.advance():
                pause.reset()
            else:
                pause.pause()

    def _advance_conditions(self) -> bool:
        if not self._conditions:
            return False
        waiting, self._conditions = self._conditions, []
        moved = False
        for condition, steps in waiting:
            if condition():
                self._resume(steps)
                moved = True
            else:
                self._conditions.append((condition, steps))
        return moved

    def _advance_requests(self) -> bool:
        from mpi4py import MPI

        done = MPI.Request.Testsome(self._requests)
        if not done:
            return False
        ready = [self._blocked[i] for i in done]
        kept = set(range(len(self._requests))) - set(done)
        self._requests = [self._requests[i] for i in sorted(kept)]
        self._blocked = [self._blocked[i] for i in sorted(kept)]
        for steps in ready:
            self._resume(steps)
        return True

    def _resume(self, steps: Coroutine[Any]) -> None:
        try:
            wait = next(steps)
            while callable(wait) and wait():  # the condition holds already
                wait = next(steps)
        except StopIteration:
            return
        if isinstance(wait, list):
            wait = self._all(wait)
        if callable(wait):
            self._conditions.append((wait, steps))
        else:
            self._requests.append(wait)
            self._blocked.append(steps)

    def _all(self, several: list[Coroutine[Any]]) -> Callable[[], bool]:
        left = len(several)

        def counted(one: Coroutine[Any]) -> Coroutine[None]:
            nonlocal left
            yield from one
            left -= 1

        for one in several:
            self.start(counted(one))
        return lambda: left == 0


def all_of(several: list[Coroutine[None]]) -> Coroutine[None]:
    """Wait for several coroutines, which go on side by side."""
    yield several


def drive(steps: Coroutine[T], *, polite: bool = False) -> T:
    """Run one coroutine to its end; returns its result."""
    return CoroutineScheduler().complete(steps, polite=polite)
