"""Stop requests: signals set a flag, and the ranks agree on it between two steps."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
TIME_LIMIT = 1000  # above all signal numbers
STOP_FILE = 1001
OFTEN = 1.0  # seconds between two looks for the file, which may lie on a network


def hold_signals() -> None:
    """Let stop signals wait until there is a `StopRequests`: a job that starts is not killed.

    Call it in the main thread before other threads start, which inherit it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class StopRequests:
    """Collects this process's reasons to stop: a signal, a file, or too little time left.

    From its making until `close`, SIGTERM, SIGUSR1 and SIGUSR2 no longer end the process; after an
    agreed stop they never do, so that nothing disturbs its orderly end. Make it in the main thread.

    Args:
        time_limit: seconds from the process's start; None is without limit.
        end: of the job, in seconds since 1970; None is without.
        file: its appearance is a reason to stop; None: none is.
    """

    def __init__(
        self, time_limit: float | None = None, end: float | None = None, file: Path | None = None
    ) -> None:
        self.time_limit, self.end, self.file = time_limit, end, file
        self._looked = 0.0
        self._started = psutil.Process().create_time()
        self._signal = 0
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._note) for number in SIGNALS
        }
        self._stopping = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what was held arrives now

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def pending(self, needed_seconds: float = 0.0, *, look: bool = True) -> int:
        """This process's reason: a signal's number, STOP_FILE, TIME_LIMIT, or 0.

        Args:
            needed_seconds: what one more step and a checkpoint would take.
            look: whether this process looks for the file.
        """
        if self._signal:
            return self._signal
        now = time.time()
        if look and self.file is not None and now - self._looked >= OFTEN:
            self._looked = now
            if self.file.exists():
                return STOP_FILE
        ends = [] if self.time_limit is None else [self._started + self.time_limit]
        ends += [] if self.end is None else [self.end]
        return TIME_LIMIT if ends and min(ends) - now < needed_seconds else 0

    def agree(
        self, group: Group, needed_seconds: float = 0.0, failure: Exception | None = None
    ) -> str | None:
        """The reason to stop now, the same on all ranks, or None. Collective.

        Args:
            group: all ranks of the job.
            needed_seconds: what one more step and a checkpoint would take.
            failure: of this rank since the last agreement.

        Raises:
            HpcTrainError: a rank has brought a failure; the same on all ranks.
        """
        pending = self.pending(needed_seconds, look=group.rank == 0)
        reason = settle(group, failure, pending)
        self._stopping = reason > 0
        if reason == STOP_FILE:
            return f"the file {self.file}"
        if reason == TIME_LIMIT:
            given = "the end of the job" if self.time_limit is None else f"{self.time_limit:.0f} s"
            return f"run.time_limit ({given})"
        return signal.Signals(reason).name if reason else None

    def close(self) -> None:
        """Put the former signal handlers back, or ignore the signals if the job is stopping."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._stopping else handler)
