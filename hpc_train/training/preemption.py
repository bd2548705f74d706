"""Stop requests: signals set a flag, and the ranks agree on it between two steps."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

import psutil

from hpc_train.mpi.group import Group

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
TIME_LIMIT = 1000  # above all signal numbers


def hold_signals() -> None:
    """Let stop signals wait until there is a `StopRequests`: a job that starts is not killed.

    Call it in the main thread before other threads start, which inherit it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class StopRequests:
    """Collects this process's reasons to stop: a signal, or too little time left.

    From its making until `close`, SIGTERM, SIGUSR1 and SIGUSR2 no longer end the process; after an
    agreed stop they never do, so that nothing disturbs its orderly end. Make it in the main thread.

    Args:
        time_limit: seconds from the process's start; None is without limit.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self.time_limit = time_limit
        self._started = psutil.Process().create_time()
        self._signal = 0
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._note) for number in SIGNALS
        }
        self._stopping = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what was held arrives now

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def pending(self, needed_seconds: float = 0.0) -> int:
        """This process's reason: a signal's number, TIME_LIMIT, or 0.

        Args:
            needed_seconds: what one more step and a checkpoint would take.
        """
        if self._signal:
            return self._signal
        if self.time_limit is not None:
            left = self._started + self.time_limit - time.time()
            if left < needed_seconds:
                return TIME_LIMIT
        return 0

    def agree(self, group: Group, needed_seconds: float = 0.0) -> str | None:
        """The reason to stop now, the same on all ranks, or None. Collective."""
        reason = group.largest(self.pending(needed_seconds))
        self._stopping = reason > 0
        if reason == TIME_LIMIT:
            return f"run.time_limit ({self.time_limit:.0f} s)"
        return signal.Signals(reason).name if reason else None

    def close(self) -> None:
        """Put the former signal handlers back, or ignore the signals if the job is stopping."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._stopping else handler)
