"""What this rank waits for, so that a rank that never comes can be named (see `watchdog.py`)."""

from __future__ import annotations

import math
import time
from types import TracebackType


class Watch:
    """Records what this process's main thread waits for; entered as a context, by that thread only.

    One object serves all groups of a job. `now` is the operation and since when (by
    `time.monotonic`); the operation is "" while the rank waits for nobody. It is one tuple, never
    changed, so another thread may read it at any moment. The end of a wait inside of another one is
    progress: the outer wait then counts from there. `seconds` is the time of all waits together.
    `limit` is how many seconds a wait may take now, if that is less than the watchdog's own.
    """

    def __init__(self) -> None:
        self.now = ("", time.monotonic())
        self.seconds = 0.0
        self.limit = math.inf
        self._next = ""
        self._outer: list[str] = []

    def __call__(self, operation: str) -> Watch:
        """Name the operation, such as "the sum of a bucket over 4 ranks", and enter the result."""
        self._next = operation
        return self

    def __enter__(self) -> None:
        now = time.monotonic()
        if self.now[0]:  # inside of another wait
            self.seconds += now - self.now[1]
        self._outer.append(self.now[0])
        self.now = (self._next, now)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        now = time.monotonic()
        self.seconds += now - self.now[1]
        self.now = (self._outer.pop(), now)
