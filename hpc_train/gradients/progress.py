"""Who lets the sums of buckets go on while the backward pass computes."""

from __future__ import annotations

import threading
import time
from typing import Any, TypeVar

from hpc_train.collectives.coroutines import Coroutine, CoroutineScheduler

T = TypeVar("T")

PAUSE = 200e-6  # seconds between two looks of the thread: 2 MB of a link of 10 GB/s


class Progress:
    """Advances coroutines from the hooks of the backward pass: it costs a look at each.

    Args:
        polite: the ranks outnumber the cores, so that waiting ranks must not hold them.
    """

    def __init__(self, *, polite: bool = False) -> None:
        self.polite = polite
        self._scheduler = CoroutineScheduler()

    def start(self, steps: Coroutine[Any]) -> None:
        """Start a coroutine."""
        self._scheduler.start(steps)

    def advance(self) -> None:
        """Let all go on that can."""
        if not self._scheduler.idle:
            self._scheduler.advance()

    def finish(self) -> None:
        """Advance until all are done."""
        self._scheduler.finish(polite=self.polite)

    def complete(self, steps: Coroutine[T]) -> T:
        """Start a coroutine and advance all until it is done; returns its result."""
        return self._scheduler.complete(steps, polite=self.polite)

    def close(self) -> None:
        """There is nothing to end."""


class ThreadProgress(Progress):
    """Advances coroutines from a thread as well, for ranks that have a core to spare for it.

    The hooks are too rare where single layers compute for long. An error in the thread is raised by
    `finish`.
    """

    def __init__(self, *, polite: bool = False) -> None:
        super().__init__(polite=polite)
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gradients", daemon=True)
        self._thread.start()

    def start(self, steps: Coroutine[Any]) -> None:
        """Start a coroutine."""
        with self._lock:
            self._scheduler.start(steps)
        self._busy.set()

    def advance(self) -> None:
        """The thread does."""

    def finish(self) -> None:
        """Advance until all are done, without the thread."""
        self._busy.clear()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._scheduler.finish(polite=self.polite)

    def complete(self, steps: Coroutine[T]) -> T:
        """As of `Progress`, without the thread."""
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._scheduler.complete(steps, polite=self.polite)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._ended = True
            self._busy.set()
        self._thread.join()

    def _run(self) -> None:
        while self._busy.wait() and not self._ended:
            with self._lock:
                try:
                    self._scheduler.advance()
                except BaseException as error:  # noqa: BLE001  it is raised in the main thread
                    self._error = error
                    self._busy.clear()
                if self._scheduler.idle and not self._ended:
                    self._busy.clear()
            time.sleep(PAUSE)
