"""Ends the ranks of a step of SLURM that a dead one has left behind.

srun would ask them by SIGTERM, which they take for a request to stop, and wait KillWait, by default
30 seconds, before it kills them; but they wait for the dead one, in vain. mpirun and the others
need no help.
"""

from __future__ import annotations

import math
import os
import re
import time

from hpc_train.host.programs import output

KILLED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: (?!Exited with exit code)")
EXITED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: Exited with exit code (?!75\b)")
TIMEOUT = 30.0  # seconds for SLURM's answer
STEP_END_SECONDS = 0.1  # seconds for srun to tell of others
LAST_WORDS_SECONDS = 5.0  # for ranks that all end with an error, each after its last words


def step_name() -> str:
    """The name given to every SLURM step that this process starts, used to find them again."""
    return f"hpc-train-{os.getpid()}"


class LeftBehind:
    """Listens to srun's output; ranks that have stopped in order, with exit code 75, are left."""

    def __init__(self) -> None:
        self._when = math.inf
        self._ended = False

    def hear(self, line: str) -> None:
        """Take note of a line of output."""
        seconds = (
            STEP_END_SECONDS
            if KILLED.search(line)
            else LAST_WORDS_SECONDS
            if EXITED.search(line)
            else math.inf
        )
        self._when = min(self._when, time.monotonic() + seconds)

    @property
    def due(self) -> bool:
        """Whether it is time to end those that are left."""
        return not self._ended and time.monotonic() >= self._when

    def end(self) -> None:
        """Kill the SLURM steps that this process has started. After that, `due` stays false."""
        self._ended = True
        job = os.environ.get("SLURM_JOB_ID", "")
        steps = output(
            "squeue", "--steps", "--noheader", "--jobs", job, "--format=%i %j", timeout=TIMEOUT
        )
        for line in steps.splitlines():
            step, _, name = line.strip().partition(" ")
            if name.strip() == step_name():
                output("scancel", "--signal=KILL", step, timeout=TIMEOUT)
