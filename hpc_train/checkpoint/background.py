"""A save in phases, carried out at once or in the background, and the copies that the latter needs.

A save is a coroutine: it yields the work that a rank does by itself, and between two pieces of work
the ranks agree. The same coroutine serves a save that the job waits for and one that a thread
carries out while the job trains: the work needs no MPI, and the agreements are made in the main
thread, at step boundaries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import numpy as np
import torch

from hpc_train.checkpoint.exchange import Exchange
from hpc_train.checkpoint.parts import Bytes
from hpc_train.errors import CheckpointError, first_line
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

T = TypeVar("T")
Work = Callable[[], Any]  # the work of one rank in one phase
PhaseOutcome = tuple[Any, Exception | None]  # the work's result, or its error
Phases = Generator[Work, PhaseOutcome, T]
Kept = tuple[int, Bytes] | None  # an extent with its number, or nothing in this round
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def agree(group: Group, work: Callable[[], T]) -> Phases[T]:
    """One phase: each rank does its work, then they agree. Collective.

    Returns:
        What this rank's work returned.

    Raises:
        HpcTrainError: the work failed on a rank. All ranks raise it, as in
            `hpc_train.mpi.agreement.settle`.
    """
    value, failure = yield work
    settle(group, failure)
    result: T = value
    return result


def carry_out(phases: Phases[T]) -> T:
    """Carry out all phases at once, in the calling thread. Collective.

    Raises:
        HpcTrainError: a phase failed.
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
    except Exception as error:  # noqa: BLE001  # the end of the phase raises it on all ranks
        return None, error


class BackgroundSave:
    """Phases whose work a thread does. All ranks make it and call its methods.

    Args:
        phases: the phases. The first one begins at once.
        group: the ranks.

    Raises:
        HpcTrainError: an agreement before the first work failed.
    """

    def __init__(self, phases: Phases[None], group: Group) -> None:
        self._phases, self._group = phases, group
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._number = 0  # of the phase
        self._begin = time.monotonic()
        work = next(phases)
        self._done = time.monotonic() - self._begin
        self._work: Future[PhaseOutcome] = self._thread.submit(self._timed, work)

    @property
    def seconds(self) -> float:
        """Seconds that it has taken this rank, without the time that it waited for steps to end."""
        return self._done + (0.0 if self._work.done() else time.monotonic() - self._begin)

    def _timed(self, work: Work) -> PhaseOutcome:
        self._begin, begin = time.monotonic(), time.perf_counter()
        outcome = _outcome(work)
        self._done += time.monotonic() - self._begin
        self._number += 1
        self._group.waiting.phases.note(
            "checkpoint", "phase %d of a save", begin, time.perf_counter(), self._number
        )
        return outcome

    def poll(self, *, wait: bool = False) -> bool:
        """Begin the next phase if all ranks have done their work. Collective.

        Args:
            wait: whether to wait until the last phase has ended.

        Returns:
            Whether the last phase has ended.

        Raises:
            HpcTrainError: a phase failed. There is no further phase.
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


@contextmanager
def enough_memory(what: str, *, background: bool) -> Iterator[None]:
    """Turn an error for lack of memory in a block into one of a checkpoint.

    Args:
        what: needs the memory.
        background: whether the checkpoint is written in the background, which takes more memory.

    Raises:
        CheckpointError: there was too little memory for `what`.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch's allocators raise a RuntimeError with one of these texts. Other errors have the
        # word, too: "an illegal memory access was encountered".
        if not isinstance(error, MemoryError) and not any(
            text in str(error) for text in _NO_MEMORY
        ):
            raise
        less = ", or set checkpoint.background to false" if background else ""
        raise CheckpointError(
            f"there is no memory for {what} of a checkpoint ({first_line(error)})",
            f"give each rank more memory{less}",
        ) from error


class Snapshot:
    """Keeps this rank's extents while training goes on to change the tensors.

    Its memory serves one checkpoint after the other.

    Parameters and optimizer state do not change before the optimizer steps. So a rank that holds
    all tensors copies them in the thread that writes, while the next step's forward and backward
    pass run, and only the optimizer waits. If other ranks hold some of the tensors, the extents are
    brought together at once, because the thread makes no MPI calls.
    """

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)
        self._taken = threading.Event()
        self._taken.set()
        self._early: threading.Thread | None = None  # gets memory

    def wait(self) -> None:
        """Wait until the tensors may be changed."""
        self._taken.wait()

    def begin_to_reserve(self, nbytes: int) -> None:
        """Get memory in a thread, because to pin a GiB takes most of a second.

        Args:
            nbytes: the expected size of this rank's extents. If it is too small, or there is no
                such memory, `reserve` gets other memory.
        """

        def get() -> None:
            with suppress(CheckpointError):
                self._get(nbytes)

        early = threading.Thread(target=get, name="checkpoint memory", daemon=True)
        with suppress(RuntimeError):  # this rank may have no further thread
            early.start()
            self._early = early

    def close(self) -> None:
        """Wait for the thread that gets memory."""
        if self._early is not None:
            self._early.join()
            self._early = None

    def reserve(self, nbytes: int) -> None:
        """Get memory for this rank's extents. Call it before `of`. It calls no other rank.

        Raises:
            CheckpointError: there is too little memory.
        """
        self.close()
        if len(self._memory) < nbytes:
            self._get(nbytes)

    def _get(self, nbytes: int) -> None:
        pinned = torch.cuda.is_available()
        with enough_memory(f"the {nbytes} bytes", background=True):
            self._memory = np.empty(0, np.uint8)  # frees the old memory before it gets the new
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            memory.zero_()  # makes the system provide the pages now, where an error is caught
            self._memory = memory.numpy()

    def of(self, exchange: Exchange, runs: Sequence[Sequence[int]], rounds: int) -> Iterator[Kept]:
        """This rank's extents, as from `Exchange.bring`. Collective over its replica.

        In a replica of one rank the tensors must not change before `wait` returns.
        """
        room = _Room(self._memory)
        if exchange.replica.comm is not None:
            return iter(list(exchange.bring(runs, rounds, room, own=False)))
        self._taken.clear()
        ready = torch.cuda.Event() if torch.cuda.is_available() else None
        if ready:
            ready.record()
        gpu = torch.cuda.current_device() if ready else 0  # which the other thread does not know
        return self._later(exchange, runs, rounds, room, ready, gpu)

    def _later(
        self,
        exchange: Exchange,
        runs: Sequence[Sequence[int]],
        rounds: int,
        room: _Room,
        ready: torch.cuda.Event | None,
        gpu: int,
    ) -> Iterator[Kept]:
        try:
            with torch.cuda.stream(torch.cuda.Stream(gpu)) if ready else nullcontext():
                if ready:
                    ready.wait()
                kept = list(exchange.bring(runs, rounds, room, own=False))
        finally:
            self._taken.set()
        yield from kept


class _Room:
    """Gives one piece of memory after the other."""

    def __init__(self, memory: Bytes) -> None:
        self._rest = memory

    def __call__(self, nbytes: int) -> Bytes:
        """Memory for `nbytes` bytes."""
        given, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return given
