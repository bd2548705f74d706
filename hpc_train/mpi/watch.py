"""Records what this rank waits for, so that `watchdog.py` can name a rank that never comes."""

from __future__ import annotations

import math
import time
from threading import Lock
from types import TracebackType

from hpc_train.mpi.phases import WAIT, StepPhases
from hpc_train.mpi.traffic import Traffic


class Watch:
    """Records what this process's main thread waits for.

    Only that thread enters the object, as a context: `with watch("the sum of a bucket"):`. One
    object serves all groups of a job. If a wait inside of another one ends, the outer wait counts
    from there, because this was progress.

    Attributes:
        now: the operation, and the time by `time.monotonic` since when the rank waits for it. The
            operation is "" while the rank waits for nobody.
        seconds: the time of all waits together.
        limit: the seconds that a wait may take now, if they are less than the watchdog's timeout.
        phases: how this rank's time is divided; a wait is a phase of its own.
        traffic: what this rank has communicated, by operation.
        polite: whether ranks that wait leave their cores to others, the same on all ranks.
        ending: held by the one of several watchdogs that ends the job.
    """

    def __init__(self) -> None:
        # The tuple is replaced and never changed, so that another thread can read it at any moment.
        self.now = ("", time.monotonic())
        self.seconds = 0.0
        self.limit = math.inf
        self.phases = StepPhases()
        self.traffic = Traffic()
        self.polite = False
        self.ending = Lock()
        self._next = ""
        self._outer: list[str] = []

    def __call__(self, operation: str) -> Watch:
        """Name the operation of the next wait, such as "the sum of a bucket over 4 ranks".

        Returns:
            This object, for `with`.
        """
        self._next = operation
        return self

    def __enter__(self) -> None:
        now = time.monotonic()
        if self.now[0]:  # inside of another wait
            self.seconds += now - self.now[1]
        self._outer.append(self.now[0])
        self.now = (self._next, now)
        self.phases(WAIT, self._next).__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        now = time.monotonic()
        self.phases.__exit__(kind, error, trace)
        self.seconds += now - self.now[1]
        self.now = (self._outer.pop(), now)
