"""Decides how long a job may go without progress, and reports progress to the launcher."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from hpc_train.launch import protocol
from hpc_train.mpi.group import Group

BEAT_SECONDS = 0.2  # least seconds between two reports: the file may be on a network file system
HANG = 60.0  # seconds; shorter waits are normal on a machine
LEARNING = 2  # number of first steps, which take longer and are not typical


class Pace:
    """Measures steps, to decide how long a rank may be silent.

    Args:
        steps: a wait inside a step is a hang when it lasts as long as this number of usual steps,
            and at least HANG seconds; 0 disables this limit.
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

    def took(self, step: int, seconds: float, *, suspended: bool = False) -> None:
        """Record the seconds that a step has taken.

        Args:
            step: the step.
            seconds: what it has taken.
            suspended: whether the process was suspended meanwhile. Then nobody knows what the step
                itself has taken, and it does not count.
        """
        if suspended:
            return
        self.longest = max(self.longest, seconds)
        self._seen += 1
        if self._seen > LEARNING and not self.unusual(step):
            self._usual = max(self._usual, seconds)

    def within(self, step: int) -> float:
        """Seconds that a rank may wait for another within a step; infinite without a limit."""
        if not self.steps or not self._usual or self.unusual(step):
            return math.inf
        return max(HANG, self.steps * self._usual)

    def until(self, step: int, save_seconds: float) -> float:
        """Seconds in which the next step must end, or else the job hangs; 0 without a limit.

        Args:
            step: the step that comes next; a checkpoint may be written before it.
            save_seconds: seconds of the longest save; 0: there was none.
        """
        within = self.within(step)
        if save_seconds and within < math.inf:
            return 2 * within + 4 * save_seconds
        return 1.5 * self.timeout


class Heartbeat:
    """Reports the last finished step from rank 0. It does nothing if no launcher asks for it.

    Args:
        group: the ranks of the job.
    """

    def __init__(self, group: Group) -> None:
        name = os.environ.get(protocol.PROGRESS, "")
        self.path = Path(name) if name and group.rank == 0 else None
        self._attempt = protocol.attempt_of(os.environ)
        self._last, self._due = -BEAT_SECONDS, 0.0

    def tell(self, step: int, due: float) -> None:
        """Report a step. Within BEAT_SECONDS of the last report only a longer `due` is reported.

        Args:
            step: the last finished step.
            due: seconds in which the next report must come; 0 without a limit.
        """
        now = time.monotonic()
        longer = (due or math.inf) > (self._due or math.inf)
        if self.path is None or (now - self._last < BEAT_SECONDS and not longer):
            return
        self._last, self._due = now, due
        protocol.write_progress(self.path, self._attempt, step, due)

    def finish(self, step: int) -> None:
        """Report that training is finished, and its last step."""
        if self.path is not None:
            protocol.write_progress(self.path, self._attempt, step, 0.0, done=True)


def restarts() -> int:
    """Number of times that a launcher has restarted this job."""
    return int(os.environ.get(protocol.RESTARTS, 0))


def history(after: int, recorded: int = 0) -> dict[str, int]:
    """How often the launcher has restarted this job, and what the last failure cost.

    Args:
        after: the step after which training resumes.
        recorded: the last step that metrics.jsonl had. The launcher may know of fewer steps,
            because progress is not reported after each one.

    Returns:
        For metrics.jsonl: restarts, and lost_steps, the number of finished steps that are repeated.
        Empty before the first restart.
    """
    if not (times := restarts()):
        return {}
    reached = max(recorded, int(os.environ.get(protocol.REACHED, 0)))
    return {"restarts": times, "lost_steps": max(0, reached - after)}
