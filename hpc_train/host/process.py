"""When a process began, and how long it has run.

Start-up time counts from its beginning. Numbers of processes are used again.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from hpc_train.files import system_text

PROC = Path("/proc")
STARTED_AT = 19  # the place of the start time among the fields behind the program's name; proc(5)


def begun_ticks(process: int | str, root: Path = PROC) -> int | None:
    """When a process began, in ticks since the boot; None if it has ended, or Linux does not tell.

    Args:
        process: its number, or "self".
        root: takes the place of /proc.
    """
    # The name of a program may have blanks and brackets.
    fields = system_text(root / f"{process}/stat").rpartition(")")[2].split()
    return int(fields[STARTED_AT]) if fields[STARTED_AT:] and fields[0] not in "XZ" else None


def seconds_since_begin(root: Path = PROC) -> float:
    """Seconds since this process began; since its fork, if it was forked. 0 if Linux does not tell.

    Args:
        root: takes the place of /proc.
    """
    ticks = begun_ticks("self", root)
    if ticks is None:
        return 0.0
    started = ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


class RunningClock:
    """Counts the seconds in which this process runs, and not those in which it was suspended.

    A process that was suspended takes long from one look to the next, without having slept so long.

    Args:
        longest: most seconds that count between two looks: more than they usually take.
    """

    def __init__(self, longest: float) -> None:
        self.longest, self.seconds = longest, 0.0
        self._last = time.monotonic()

    def look(self) -> float:
        """The seconds so far."""
        now = time.monotonic()
        self.seconds += min(now - self._last, self.longest)
        self._last = now
        return self.seconds


@dataclass
class StartUp:
    """The time of a program before its first run, which only that run counts.

    Args:
        began: when the program began, by `time.monotonic`; None: the time before a run is not a
            run's, as in a notebook.
    """

    began: float | None = None

    def take(self) -> float:
        """When a run that begins now has begun, by `time.monotonic`."""
        began, self.began = self.began, None
        return time.monotonic() if began is None else began
