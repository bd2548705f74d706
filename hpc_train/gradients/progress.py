"""Advances the sums of buckets while the backward pass computes."""

from __future__ import annotations

import threading
import time
from typing import Any, TypeVar

from hpc_train.collectives.coroutines import Coroutine, CoroutineScheduler

T = TypeVar("T")

PAUSE = 200e-6  # seconds that the thread sleeps; a link of 10 GB/s carries 2 MB in that time


class Progress:
    """Advances coroutines whenever a hook of the backward pass calls `advance`.

    Args:
        polite: whether waiting ranks give up their cores, for nodes with more ranks than cores.
    """

    def __init__(self, *, polite: bool = False) -> None:
        self.polite = polite
        self._scheduler = CoroutineScheduler()

    def start(self, steps: Coroutine[Any]) -> None:
        """Start a coroutine."""
        self._scheduler.start(steps)

    def advance(self) -> None:
        """Let all coroutines go on whose wait is over."""
        if not self._scheduler.idle:
            self._scheduler.advance()

    def finish(self) -> None:
        """Advance until all coroutines are done."""
        self._scheduler.finish(polite=self.polite)

    def complete(self, steps: Coroutine[T]) -> T:
        """Start a coroutine and advance all until it is done; returns its result."""
        return self._scheduler.complete(steps, polite=self.polite)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class ThreadProgress(Progress):
    """Advances coroutines in a thread, for ranks that have a core to spare for it.

    Hooks are called too rarely if single layers compute for long. An error in the thread is raised
    by `finish` or `complete`.
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
        """Do nothing: the thread advances the coroutines."""

    def finish(self) -> None:
        """Advance until all coroutines are done, in the calling thread."""
        self._busy.clear()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._scheduler.finish(polite=self.polite)

    def complete(self, steps: Coroutine[T]) -> T:
        """Complete a coroutine as `Progress` does, in the calling thread."""
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
