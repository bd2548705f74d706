"""How long a job may go without progress, and telling it to a launcher that supervises the job."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from hpc_train.launch import protocol
from hpc_train.mpi.group import Group

BEAT_SECONDS = 0.2  # seconds between two at the least: the file may lie on a network
HANG = 60.0  # seconds: shorter waits are a machine's own hiccups
LEARNING = 2  # first steps, which take longer than others and tell less


class Pace:
    """What steps have taken, and so how long a silence may be.

    Args:
        steps: a wait inside a step hangs when it lasts as long as this number of usual steps, and
            at least HANG seconds; 0 disables this.
        timeout: seconds that any wait may last; 0 disables the limit.
        unusual: returns True for steps that take atypically long, such as those with a validation.
    """

    def __init__(
        self, steps: int, timeout: float, unusual: Callable[[int], bool] = lambda step: False
    ) -> None:
        self.steps, self.timeout, self.unusual = steps, timeout, unusual
        self.longest = 0.0  # seconds of any step so far
        self._usual = 0.0
        self._seen = 0

    def took(self, step: int, seconds: float) -> None:
        """Note what a step has taken."""
        self.longest = max(self.longest, seconds)
        self._seen += 1
        if self._seen > LEARNING and not self.unusual(step):
            self._usual = max(self._usual, seconds)

    def within(self, step: int) -> float:
        """Seconds that a rank may wait for another within a step."""
        if not self.steps or not self._usual or self.unusual(step):
            return math.inf
        return max(HANG, self.steps * self._usual)

    def until(self, step: int, save_seconds: float) -> float:
        """Seconds until the end of a step at the latest, if all goes well; 0: nobody knows.

        Args:
            step: the next one, before which a checkpoint may be written.
            save_seconds: what the longest has taken; 0: none has been written.
        """
        within = self.within(step)
        if save_seconds and within < math.inf:
            return 2 * within + 4 * save_seconds
        return 1.5 * self.timeout


class Heartbeat:
    """Tells the last finished step, on rank 0; without a launcher that asks for it, nothing.

    Args:
        group: the ranks of the job.
    """

    def __init__(self, group: Group) -> None:
        name = os.environ.get(protocol.PROGRESS, "")
        self.path = Path(name) if name and group.rank == 0 else None
        self._last, self._due = -BEAT_SECONDS, 0.0

    def tell(self, step: int, due: float) -> None:
        """Tell it, unless that has just been done.

        Args:
            step: the last finished one.
            due: seconds until the next one will be told at the latest; 0: nobody knows.
        """
        now = time.monotonic()
        if self.path is None or (now - self._last < BEAT_SECONDS and due <= self._due):
            return
        self._last, self._due = now, due
        protocol.write_progress(self.path, step, due)

    def finish(self, step: int) -> None:
        """Tell that training has come to its end, and with which step."""
        if self.path is not None:
            protocol.write_progress(self.path, step, 0.0, done=True)


def restarts() -> int:
    """How often a launcher has started this job again."""
    return int(os.environ.get(protocol.RESTARTS, 0))


def history(after: int) -> dict[str, int]:
    """How often the launcher has started this job again, and what the last failure cost.

    Args:
        after: the step after which training goes on.

    Returns:
        For metrics.jsonl: restarts, and lost_steps: finished ones that are done again. Empty before
        the first restart.
    """
    if not (times := restarts()):
        return {}
    reached = int(os.environ.get(protocol.REACHED, 0))
    return {"restarts": times, "lost_steps": max(0, reached - after)}
