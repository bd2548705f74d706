"""What this rank waits for, so that a rank that never comes can be named."""

from __future__ import annotations

import time
from types import TracebackType


class Watch:
    """Records the operation that this rank's main thread waits in; entered as a context.

    One object serves all groups of a job; `operation` is "" while the rank waits for nobody.
    """

    def __init__(self) -> None:
        self.operation = ""
        self.since = 0.0

    def __call__(self, operation: str) -> Watch:
        """Name the operation, such as "the sum of a bucket over 4 ranks", and enter the result."""
        self._next = operation
        return self

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self.operation = self._next

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.operation = ""
