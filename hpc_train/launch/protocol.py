"""What launchers and batch scripts, and the jobs that they start, say to each other.

A supervising launcher names a file, in which the job's first rank writes how far it is, and says
how often it has started the job; batch scripts say when it ends; a file in the run directory stops
it.
The templates in `jobscripts/` hold the same names.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STOP = "STOP"  # a file of this name in a run directory ends the run, which is not queued again
DEADLINE = "HPC_TRAIN_DEADLINE"  # the job's end, in seconds since 1970
PROGRESS = "HPC_TRAIN_PROGRESS"  # the file of `write_progress`
LAUNCH = "HPC_TRAIN_LAUNCH"  # a random name, of all attempts of one launcher
RESTARTS = "HPC_TRAIN_RESTARTS"  # how often the launcher has started the job again
REACHED = "HPC_TRAIN_REACHED"  # the last step that was done before it did
# Of these the launcher makes SIGUSR1 for the ranks. SIGHUP: the terminal is closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class JobProgress(NamedTuple):
    """How far a job is.

    Args:
        step: the last one that is done; -1: nothing is known.
        due: seconds until it will tell more at the latest; 0: not known.
        done: whether training has come to its end.
        written: the file's time of change.
    """

    step: int
    due: float
    done: bool = False
    written: float = 0.0


def write_progress(path: Path, step: int, due: float, *, done: bool = False) -> None:
    """Write the job's progress; nothing happens if that fails: a job does not end for this."""
    with suppress(OSError):
        path.write_text(json.dumps({"step": step, "due": due, "done": done}))


def read_progress(path: Path) -> JobProgress:
    """What has been written last."""
    with suppress(OSError, ValueError):
        values = json.loads(path.read_text())
        return JobProgress(values["step"], values["due"], values["done"], path.stat().st_mtime)
    return JobProgress(-1, 0.0)
