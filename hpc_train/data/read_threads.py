"""Calls functions that read: one after the other, or in threads where such reads take long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLOW_SECONDS = 3e-5  # seconds per read from which on threads pay: a disk's, not the page cache's


class ReadThreads:
    """Reads of one kind, which take about as long as they took last time.

    Args:
        most: the largest number of threads.
        factor: how many times SLOW_SECONDS a read of this kind may take without threads.

    The attribute `seconds` has the seconds that a read took last time.
    """

    def __init__(self, most: int, factor: int = 1) -> None:
        self.most, self.factor = most, factor
        self.seconds = 0.0

    @property
    def are_slow(self) -> bool:
        """Whether the last reads took longer than reads from memory."""
        return self.seconds > self.factor * SLOW_SECONDS

    def each(self, read: Callable[[int], None], count: int) -> None:
        """Call a function that reads, for 0 to count - 1. Its errors are raised here."""
        at_once = min(self.most, count) if self.are_slow else 1
        left, errors = iter(range(count)), list[BaseException]()

        def read_some() -> int:
            done = 0
            try:
                for item in left:  # each item goes to one thread: a range's iterator is atomic
                    read(item)
                    done += 1
            except BaseException as error:  # noqa: BLE001  # raised below, in the caller's thread
                errors.append(error)
            return done

        # Daemons, because a read that never returns must not keep the program from its end.
        others = [threading.Thread(target=read_some, daemon=True) for _ in range(at_once - 1)]
        for thread in others:
            thread.start()
        begin = time.perf_counter()
        done = read_some()
        # Only this thread's reads count: starting threads takes longer than reading from memory.
        self.seconds = (time.perf_counter() - begin) / max(1, done)
        for thread in others:
            thread.join()
        if errors:
            raise errors[0]
