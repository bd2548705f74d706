"""Feeds the trackers of a job in threads, so that none of them delays or ends training."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hpc_train.errors import plural
from hpc_train.trackers.choose import make_sink
from hpc_train.trackers.feed import Feed
from hpc_train.trackers.source import TrackedRun

ROUND_SECONDS = 1.0  # in which records are gathered, as each round writes a mark
RETRY_SECONDS = 60.0  # from a tracker's failure to the next try
LAST_SECONDS = 3.0  # that the end of a job waits for its trackers
LATE = 1000  # records by which a tracker is behind when it is called slow

logger = logging.getLogger(__name__)


class TrackerThread:
    """A thread that feeds one tracker.

    It takes records from metrics.jsonl, so it keeps only their steps in memory, and a record that a
    tracker did not take is there for the next try.

    Args:
        run: the run.
        name: the name of the tracker.
        allowed: whether this job still owns the run directory.
    """

    def __init__(self, run: TrackedRun, name: str, allowed: Callable[[], bool]) -> None:
        self.run, self.name, self.allowed = run, name, allowed
        self._feed: Feed | None = None
        self._left = array("q")  # the steps of records that the tracker did not have yet
        self._marked = 0  # the last one that it has, while it has no feed
        self._late = self._failing = False  # whether a warning has said so
        self._retry = 0.0
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def tell(self, step: int) -> None:
        """Say that there is a record of a step more."""
        self._left.append(step)
        self._wake.set()
        if self._count() > LATE and not self._late:
            self._late = True
            logger.warning("%s has not taken %d records yet; training goes on", self.name, LATE)

    def _count(self) -> int:
        """The number of records that the tracker does not have yet."""
        feed = self._feed
        del self._left[: bisect_right(self._left, self._marked if feed is None else feed.marked)]
        return len(self._left)

    def end(self) -> None:
        """Say that there is nothing more to come."""
        self._ending.set()
        self._wake.set()

    def join(self, until: float) -> None:
        """Wait for the thread until a time of time.monotonic(). Say how many records it left."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if left := self._count():
            logger.warning(
                "%s lacks the last %s: `hpc-train log export %s --to %s` adds them, and so does "
                "the next start of the run if it trains on",
                *(self.name, plural(left, "record"), self.run.path, self.name),
            )

    def _loop(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ending = self._ending.wait(ROUND_SECONDS)
            if ending or time.monotonic() >= self._retry:
                try:
                    if self.allowed():
                        self._pass_on()
                except Exception as error:  # noqa: BLE001  # no tracker may end training
                    self._failed(error)
            if ending:
                with suppress(Exception):
                    self._close()
                return

    def _pass_on(self) -> None:
        if self._feed is None:
            self._feed = Feed(self.run, self.name, make_sink(self.run, self.name))
        self._feed.pass_on()
        self._failing = False

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            logger.warning(
                "%s fails (%s: %s); training goes on, and it is tried again",
                *(self.name, type(error).__name__, error),
            )
        self._failing = True
        self._retry = time.monotonic() + RETRY_SECONDS
        with suppress(Exception):
            self._close()

    def _close(self) -> None:
        feed = self._feed
        if feed is not None:
            self._marked, self._feed = feed.marked, None
            feed.close()


class Trackers:
    """The trackers of a job, on rank 0.

    Args:
        run: the run.
        names: the trackers' names.
        allowed: whether this job still owns the run directory.
    """

    def __init__(self, run: TrackedRun, names: Sequence[str], allowed: Callable[[], bool]) -> None:
        self.threads = [TrackerThread(run, name, allowed) for name in names]

    def listen(self, record: dict[str, Any]) -> None:
        """Note that a record was written."""
        for thread in self.threads:
            thread.tell(record["step"])

    def close(self) -> None:
        """Wait a moment for the trackers to take what is left."""
        for thread in self.threads:
            thread.end()
        until = time.monotonic() + LAST_SECONDS
        for thread in self.threads:
            thread.join(until)
