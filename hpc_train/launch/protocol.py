"""The files and variables by which a job talks with its launcher and its batch script.

The launcher names a file to which rank 0 of the job writes its progress, and says how often it has
restarted the job. The batch script says when the job ends. A file in the run directory stops it.
The templates in `jobscripts/` use the same names.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STOP = "STOP"  # a file of this name in a run directory ends the run for good
PROFILES = "profile"  # in a run directory: the folder of profiles, and of the two files below
PROFILE_REQUEST = "request.json"  # asks the job for a profile, see `profile_request.py`
PROFILE_ANSWER = "answer.json"  # what the job says to the last request
QUEUED = "jobs.jsonl"  # in a run directory: the jobs that were queued, see `queued.py`
DEADLINE = "HPC_TRAIN_DEADLINE"  # the job's end, in seconds since 1970
PROGRESS = "HPC_TRAIN_PROGRESS"  # the file of `write_progress`
LAUNCH = "HPC_TRAIN_LAUNCH"  # a random name, the same in all attempts of one launcher
RESTARTS = "HPC_TRAIN_RESTARTS"  # how often the launcher has restarted the job
LOCAL_JOB = "HPC_TRAIN_LOCAL_JOB"  # the id of a job without a scheduler, set by its script
PROGRESS_BYTES = 160  # of that file: more than any progress needs
REACHED = "HPC_TRAIN_REACHED"  # the last step that was finished before the restart
# For each of these the launcher sends SIGUSR1 to the ranks. SIGHUP: the terminal was closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
SCRIPT_SECONDS = 8.0  # seconds in which a script asks the scheduler (5 s at most) and queues again
RANK_SECONDS = 0.01  # seconds in which one more rank ends, see docs/how-to/stop-and-resume.md


def seconds_to_end(ranks: int) -> float:
    """Seconds that a job needs after its last checkpoint: for MPI, the launcher and the script."""
    return SCRIPT_SECONDS + RANK_SECONDS * ranks


class JobProgress(NamedTuple):
    """How far a job is.

    Args:
        step: the last finished step; -1: none is known.
        due: seconds in which the next report must come; 0: no limit is known.
        done: whether training is finished.
        written: when the file was last changed, in seconds since 1970.
    """

    step: int
    due: float
    done: bool = False
    written: float = 0.0


NO_PROGRESS = JobProgress(-1, 0.0)


def attempt_of(environ: Mapping[str, str]) -> str:
    """The name of the launcher's attempt that a process belongs to; nobody else has it."""
    return f"{environ.get(LAUNCH, '')}-{environ.get(RESTARTS, '0')}"


def write_progress(path: Path, attempt: str, step: int, due: float, *, done: bool = False) -> None:
    """Write an attempt's progress. An error is ignored, because it must not end the job.

    It is written over the last one. A full file system takes that, but no new content.
    """
    values = {"attempt": attempt, "step": step, "due": due, "done": done}
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(descriptor, json.dumps(values).ljust(PROGRESS_BYTES).encode(), 0)
        finally:
            os.close(descriptor)


def read_progress(path: Path, attempt: str, last: JobProgress = NO_PROGRESS) -> JobProgress:
    """The progress that an attempt has written last.

    Args:
        path: the file.
        attempt: its name.
        last: what was read before. It stands for a file that cannot be read, or is another one's.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["attempt"] == attempt:
            return JobProgress(values["step"], values["due"], values["done"], path.stat().st_mtime)
    return last
