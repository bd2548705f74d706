"""Requests to stop: a signal sets a flag, and the ranks agree on it between two steps."""

from __future__ import annotations

import _thread
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from hpc_train import files
from hpc_train.host.process import seconds_since_begin
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

REQUEST_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ASKED = 1  # below all signal numbers: no reason to stop
SOON = 2  # the same
TIME_LIMIT = 1000  # above all signal numbers
STOP_FILE = 1001
ENOUGH = 1002
INTERRUPTED = 1003
EARLY = 0.1  # share of a job's time after which it must know how long a checkpoint takes
KEPT_SECONDS = 60.0  # seconds in which a program that is starting must come to answer a signal
ONE_PRESS = 1.0  # seconds in which signals of one Ctrl-C come
STOP_FILE_SECONDS = 1.0  # seconds between two looks for the file, which may be on a network


def hold_signals() -> None:
    """Hold stop signals back until a `StopRequests` is made, so that they cannot kill a start.

    Call it in the main thread before other threads start: they inherit it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUEST_SIGNALS)


class SignalKeeper:
    """Keeps a stop signal of a program that is starting, until a `StopRequests` takes it.

    Own programs do other things, too. So a handler keeps it, which they may replace, and which
    their child processes do not inherit. The signal ends the process if nothing has taken it after
    KEPT_SECONDS.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._process, self._until = os.getpid(), math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Keep a signal. A child process that was forked has no use for it."""
        now = time.monotonic()
        if os.getpid() != self._process or now >= self._until:
            end_by(number)
        elif not self.signal:
            self.signal, self._until = number, now + KEPT_SECONDS
            # A handler may have interrupted `threading`, whose locks it must not wait for.
            _thread.start_new_thread(self._remind, ())

    def _remind(self) -> None:
        time.sleep(KEPT_SECONDS)
        if self.signal:
            os.kill(self._process, self.signal)

    def taken(self) -> int:
        """The signal, which is no longer kept; 0: there was none."""
        number, self.signal, self._until = self.signal, 0, math.inf
        return number


class Interrupts:
    """What Ctrl-C does: the first one is a request to stop with a checkpoint, a second one ends.

    The first one ends the program, too, if no `StopRequests` is there to answer, nor expected.
    """

    def __init__(self) -> None:
        self._came = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Ask for a stop. Signals that come together are one Ctrl-C, passed on in several ways."""
        now = time.monotonic()
        if not self._came and _is_answered(signal.SIGTERM):
            self._came = now
            StopRequests.interrupted = True
            signal.raise_signal(signal.SIGTERM)
        elif now - self._came > ONE_PRESS:
            raise KeyboardInterrupt


def _is_answered(number: int) -> bool:
    """Whether a `StopRequests` answers a signal, or the signal is held back for one."""
    by = getattr(signal.getsignal(number), "__self__", None)
    return isinstance(by, StopRequests) or number in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def end_by(number: int) -> None:
    """Do what a signal does to a process that has no handler for it."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Keep stop signals that come before a `StopRequests` is made. Signals with handlers are left.

    If none is made, a signal that came ends the process when the block is done. Ctrl-C asks for a
    stop, too, while there is one (`Interrupts`). What a training has not answered before the block
    is done is dropped, as it is not for the next block.
    """
    if threading.current_thread() is not threading.main_thread():  # which cannot have handlers
        yield
        return
    keeper = SignalKeeper()
    kept = [n for n in REQUEST_SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
    for number in kept:
        signal.signal(number, keeper)
    interrupts = Interrupts()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupts)
    try:
        yield
    finally:
        StopRequests.interrupted, StopRequests.unanswered = False, 0
        if signal.getsignal(signal.SIGINT) is interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in kept:
            if signal.getsignal(number) is keeper:
                signal.signal(number, signal.SIG_DFL)
        came = keeper.taken()
    if came:
        end_by(came)


class StopRequests:
    """Collects this process's reasons to stop: a signal, a file, or too little time left.

    From its making until `close`, SIGTERM, SIGUSR1 and SIGUSR2 do not end the process. After an
    agreed stop they never do, so that nothing disturbs its orderly end. Make it in the main thread.

    Args:
        time_limit: seconds from the process's start; None: no limit.
        end: end of the job, in seconds since 1970; None: no end is known.
        file: a file that is a reason to stop once it exists; None: there is no such file.
    """

    interrupted: ClassVar[bool] = False
    """Whether this process has sent SIGTERM to itself because of Ctrl-C."""
    unanswered: ClassVar[int] = 0
    """A signal that came to a training of this program after its last agreement. The next training
    answers it, because schedulers send one signal only; 0: there is none."""

    def __init__(
        self, time_limit: float | None = None, end: float | None = None, file: Path | None = None
    ) -> None:
        self.time_limit, self.end, self.file = time_limit, end, file
        self.enough = False
        """Whether this process wants to end as if training were finished (`loop.stop()`)."""
        self.ended = False
        """Whether the ranks have agreed on that."""
        self.soon = False
        """Whether the ranks have agreed to save once, to measure how long that takes."""
        self.asked = False
        """Whether the ranks have agreed on what a rank asked for, see `agree`."""
        self.continued = 0
        """How often this process was continued after a suspension (SIGCONT)."""
        self._total = math.inf
        self._looked = -math.inf
        # Not by the clock of the host, which may be set while the job runs.
        begun = time.monotonic() - seconds_since_begin()
        self._limit = math.inf if time_limit is None else begun + time_limit
        self._signal, StopRequests.unanswered = StopRequests.unanswered, 0
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._note) for number in REQUEST_SIGNALS
        }
        for number, handler in self._before.items():
            if isinstance(handler, SignalKeeper):
                self._signal = handler.taken() or self._signal
                self._before[number] = signal.SIG_DFL  # the program has started
        self._on_continue = signal.getsignal(signal.SIGCONT)
        if self._on_continue is not None:  # else a library has a handler that is not Python's
            signal.signal(signal.SIGCONT, self._note_continued)
            signal.siginterrupt(signal.SIGCONT, False)  # the calls of libraries go on as without it
        self._stopping = False
        # Signals that `hold_signals` has held back arrive now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUEST_SIGNALS)

    @property
    def limited(self) -> bool:
        """Whether there is a time limit."""
        return self.time_limit is not None or self.end is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _note_continued(self, number: int, frame: FrameType | None) -> None:
        self.continued += 1
        if callable(self._on_continue):
            self._on_continue(number, frame)

    def pending(
        self, needed_seconds: float = 0.0, *, look: bool = True, untried: bool = False
    ) -> int:
        """This process's reason to stop: a signal, or a number of this module; 0: none.

        Args:
            needed_seconds: seconds that one more step and a checkpoint would take.
            look: whether this process looks for the file.
            untried: whether the time of a checkpoint is still unknown.
        """
        if self.enough:
            return ENOUGH
        if self._signal:
            return INTERRUPTED if self.interrupted else self._signal
        now = time.monotonic()
        if look and self.file is not None and now - self._looked >= STOP_FILE_SECONDS:
            self._looked = now
            if files.is_there(self.file):
                return STOP_FILE
        if not self.limited:
            return 0
        left = self._limit - now
        if self.end is not None:
            left = min(left, self.end - time.time())
        if math.isinf(self._total):
            self._total = left
        if left < needed_seconds:
            return TIME_LIMIT
        return SOON if untried and left <= (1 - EARLY) * self._total else 0

    def agree(
        self,
        group: Group,
        needed_seconds: float = 0.0,
        failure: Exception | None = None,
        *,
        untried: bool = False,
        asks: bool = False,
    ) -> str | None:
        """The reason to stop now, the same on all ranks, or None. Collective.

        Args:
            group: all ranks of the job.
            needed_seconds: seconds that one more step and a checkpoint would take.
            failure: a failure of this rank since the last agreement.
            untried: whether the time of a checkpoint is still unknown.
            asks: whether this process asks all others for something else, such as a profile. It
                asks again if they agree on another thing.

        Raises:
            HpcTrainError: a rank has a failure; the same error is raised on all ranks.
        """
        pending = self.pending(needed_seconds, look=group.rank == 0, untried=untried)
        reason = settle(group, failure, max(pending, ASKED * asks))
        self.ended, self.soon, self.asked = reason == ENOUGH, reason == SOON, reason == ASKED
        self._stopping = reason > SOON and not self.ended
        if self.soon or self.asked:
            return None
        if self.ended:
            return "loop.stop()"
        if reason == STOP_FILE:
            return f"the file {self.file}"
        if reason == TIME_LIMIT:
            given = "the end of the job" if self.time_limit is None else f"{self.time_limit:.0f} s"
            return f"time_limit ({given})"
        if reason == INTERRUPTED:
            return "Ctrl-C"
        return signal.Signals(reason).name if reason else None

    def close(self) -> None:
        """Put the former signal handlers back, or ignore the signals if the job is stopping.

        A signal that nobody has answered is kept for the next training of the program.
        """
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # else another handler has replaced ours
                signal.signal(number, signal.SIG_IGN if self._stopping else handler)
        if signal.getsignal(signal.SIGCONT) == self._note_continued:
            signal.signal(signal.SIGCONT, self._on_continue)
        if self._signal and not self._stopping:
            outer = getattr(self._before[signal.SIGTERM], "__self__", None)
            if isinstance(outer, StopRequests):  # this training ran inside another one
                outer._signal = outer._signal or self._signal
            else:
                StopRequests.unanswered = self._signal
            self._signal = 0
