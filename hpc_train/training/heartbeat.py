"""Tells a launcher that supervises this job how far it is, by a file that it names."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from hpc_train.mpi.group import Group

FILE = "HPC_TRAIN_PROGRESS"
RESTARTS = "HPC_TRAIN_RESTARTS"
REACHED = "HPC_TRAIN_REACHED"
OFTEN = 0.2  # seconds between two at the least: the file may lie on a network


class Heartbeat:
    """Writes the last finished step, on rank 0; without a launcher that asks for it, nothing.

    Args:
        group: the ranks of the job.
        after: the step after which training goes on.
    """

    def __init__(self, group: Group, after: int) -> None:
        name = os.environ.get(FILE, "")
        self.path = Path(name) if name and group.rank == 0 else None
        self._last = -OFTEN
        self.tell(after, 0.0)

    def tell(self, step: int, due: float) -> None:
        """Tell it, unless that has just been done.

        Args:
            step: the last finished one.
            due: seconds until the next one will be told at the latest; 0: nobody knows.
        """
        now = time.monotonic()
        if self.path is None or now - self._last < OFTEN:
            return
        self._last = now
        with suppress(OSError):  # a job does not end for this
            self.path.write_text(json.dumps({"step": step, "due": due}))


def history(after: int) -> dict[str, int]:
    """How often the launcher has started this job again, and what the last failure cost.

    Args:
        after: the step after which training goes on.

    Returns:
        For metrics.jsonl: restarts, and lost_steps: finished ones that are done again. Empty before
        the first restart.
    """
    restarts = int(os.environ.get(RESTARTS, 0))
    if not restarts:
        return {}
    return {"restarts": restarts, "lost_steps": max(0, int(os.environ.get(REACHED, 0)) - after)}
