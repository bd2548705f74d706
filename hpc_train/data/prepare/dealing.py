"""Deals the portions of a preparation to the ranks.

Ranks take portions by making files, which one rank alone can, so they need no messages.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic

from hpc_train import files
from hpc_train.data.prepare.partial import Preparation, R, ShardPortion, entry_names, writing_to

logger = logging.getLogger(__name__)

FAILED_FILE = "failed"
TELL_SECONDS = 5.0  # seconds between two lines of progress


class AbandonedError(Exception):
    """Another rank has failed, and says why."""


class Dealing(Generic[R]):
    """Deals the portions to the ranks. Each rank has one.

    Rank 0's logs the progress of all ranks.

    Args:
        preparation: the preparation.
        rank: this process's number, from 0 to size - 1.
        size: number of ranks.
    """

    def __init__(self, preparation: Preparation[R], rank: int = 0, size: int = 1) -> None:
        self.preparation, self.rank, self.size = preparation, rank, size
        self.scratch = preparation.attempt / f"rank-{rank}"
        finished = preparation.finished
        self._share([one for one in preparation.portions if one.name not in finished])
        self._claim: int | None = None
        self._done = 0
        self._told = self._begin = time.monotonic()

    def take(self) -> ShardPortion | None:
        """Take a portion that no rank has taken; None if there is no more.

        Raises:
            AbandonedError: another rank has failed.
        """
        self.close()
        attempt = self.preparation.attempt
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while not (attempt / FAILED_FILE).exists():
            if not self._free:
                return None
            portion = self._free.pop(self._next % len(self._free))
            try:
                self._claim = os.open(attempt / portion.name, flags, 0o666)
            except FileExistsError:  # this rank's share ends here
                taken = {path.name for path in attempt.iterdir()}
                self._share([one for one in self._free if one.name not in taken])
            else:
                self._done = 0
                return portion
        raise AbandonedError

    def _share(self, free: list[ShardPortion]) -> None:
        """Divide portions that may be free among the ranks. Each takes those of its share first.

        The folder of what is taken is listed only when a share ends: there may be many portions.
        """
        self._free, self._next = free, self.rank * len(free) // self.size

    def tell(self, nbytes: int) -> None:
        """Count bytes that this rank has read. Every few seconds, tell of it.

        Raises:
            AbandonedError: another rank has failed.
        """
        self._done += nbytes
        if time.monotonic() - self._told < TELL_SECONDS:
            return
        if (self.preparation.attempt / FAILED_FILE).exists():
            raise AbandonedError
        if self._claim is not None:
            files.write_at(self._claim, b"%020d" % self._done, 0)
        self.look()

    def look(self) -> None:
        """Log the progress of all ranks on rank 0, if it is time."""
        now = time.monotonic()
        if now - self._told < TELL_SECONDS:
            return
        self._told = now
        if self.rank:
            return
        made = self.preparation
        ready = entry_names(made.folder)
        taken = {path.name for path in made.attempt.iterdir()}
        total = sum(portion.nbytes for portion in made.portions)
        before = sum(one.nbytes for one in made.portions if one.name in made.finished)
        done = 0
        for portion in made.portions:
            if portion.name in ready:
                done += portion.nbytes
            elif portion.name in taken:
                read = (made.attempt / portion.name).read_bytes()
                done += min(portion.nbytes, int(read or 0))
        speed = (done - before) / (now - self._begin)
        logger.info(
            "%.0f %% of the input done, %.1f MiB/s, %.0f s left",
            100 * done / max(1, total),
            speed / 2**20,
            (total - done) / max(1.0, speed),
        )

    def fail(self) -> None:
        """Tell the other ranks that this one has failed."""
        with suppress(OSError):  # a rank that cannot tell lets them finish their portions
            (self.preparation.attempt / FAILED_FILE).touch()

    def close(self) -> None:
        """Close the file of the portion that was taken last."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None


def make_portions(dealing: Dealing[R], make: Callable[[ShardPortion], None]) -> None:
    """Make portions until there is none left. Every rank calls; they need not wait for each other.

    It returns early if another rank has failed.

    Raises:
        DataError: a file cannot be read, has changed or has an error, or the disk is full.
    """
    try:
        with writing_to(dealing.preparation.target):
            dealing.preparation.check_shared()
            while portion := dealing.take():
                dealing.scratch.mkdir(exist_ok=True)
                make(portion)
    except AbandonedError:
        return
    except BaseException:
        dealing.fail()
        raise
    finally:
        dealing.close()
