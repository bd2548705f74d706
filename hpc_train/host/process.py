"""When this process began, so that the time of its start-up can be counted."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

OWN_STAT = Path("/proc/self/stat")
STARTED_AT = 19  # the place of the start time among the fields behind the program's name; proc(5)


def seconds_since_begin(stat: Path = OWN_STAT) -> float:
    """Seconds since this process began; since its fork, if it was forked. 0 if Linux does not tell.

    Args:
        stat: takes the place of /proc/self/stat.
    """
    try:
        fields = (
            stat.read_text().rpartition(")")[2].split()
        )  # the name may have blanks and brackets
        started = int(fields[STARTED_AT]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


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
