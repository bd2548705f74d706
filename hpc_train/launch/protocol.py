"""The files and variables by which a job talks with its launcher and its batch script.

The launcher names a file to which rank 0 of the job writes its progress, and says how often it has
restarted the job. The batch script says when the job ends. A file in the run directory stops it.
The templates in `jobscripts/` use the same names.
"""

from __future__ import annotations

import json
import signal
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


def write_progress(path: Path, step: int, due: float, *, done: bool = False) -> None:
    """Write the job's progress. An error is ignored, because it must not end the job."""
    with suppress(OSError):
        path.write_text(json.dumps({"step": step, "due": due, "done": done}), encoding="utf-8")


def read_progress(path: Path) -> JobProgress:
    """The progress that was written last."""
    with suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
        return JobProgress(values["step"], values["due"], values["done"], path.stat().st_mtime)
    return JobProgress(-1, 0.0)
