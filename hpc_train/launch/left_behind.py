"""Kills the remaining ranks of a SLURM step when one of its ranks has died.

srun itself would send them SIGTERM, which they take for a request to stop, and would kill them only
after KillWait, by default 30 seconds. Until then they wait in vain for the dead rank. mpirun and
the other launchers kill the remaining ranks at once.
"""

from __future__ import annotations

import math
import os
import re
import time

from hpc_train.host.programs import output

KILLED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: (?!Exited with exit code)")
EXITED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: Exited with exit code (?!75\b)")
TIMEOUT = 30.0  # seconds to wait for SLURM's answer
STEP_END_SECONDS = 0.1  # seconds in which srun can report other ranks that died
LAST_WORDS_SECONDS = 5.0  # the same for ranks that exit with an error, which print it first


def step_name() -> str:
    """The name given to every SLURM step that this process starts, used to find them again."""
    return f"hpc-train-{os.getpid()}"


class LeftBehind:
    """Finds dead ranks in srun's output. Exit code 75, a stop with a checkpoint, is no death."""

    def __init__(self) -> None:
        self._when = math.inf
        self._ended = False

    def hear(self, line: str) -> None:
        """Look for a dead rank in a line of output."""
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
        """Whether it is time to kill the remaining ranks."""
        return not self._ended and time.monotonic() >= self._when

    def end(self) -> None:
        """Kill the SLURM steps that this process has started. From then on `due` is False."""
        self._ended = True
        job = os.environ.get("SLURM_JOB_ID", "")
        steps = output(
            "squeue", "--steps", "--noheader", "--jobs", job, "--format=%i %j", timeout=TIMEOUT
        )
        for line in steps.splitlines():
            step, _, name = line.strip().partition(" ")
            if name.strip() == step_name():
                output("scancel", "--signal=KILL", step, timeout=TIMEOUT)
