"""What the operating system counts of a process and of its processors. Missing numbers are NaN."""

from __future__ import annotations

import math
import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CHEAP = 200e-6  # seconds that reading a file may take, if it is read often
TICKS = os.sysconf("SC_CLK_TCK")
PROC, DEVICES = Path("/proc"), Path("/sys/devices/system/cpu")
SENSORS = Path("/sys/class/hwmon")


class Disturbances(NamedTuple):
    """What has disturbed a process so far.

    Args:
        faults: pages that were new to the process.
        reads: pages that had to be read from a disk.
        system: seconds that the calling thread spent in the kernel.
        switches: how often a thread lost its processor to another program.
        delayed: seconds that the calling thread was ready to run, and had no processor.
        stolen: seconds that the hypervisor has taken from the process's processors.
    """

    faults: float
    reads: float
    system: float
    switches: float
    delayed: float
    stolen: float


class ProcessCounters:
    """Reads the counters of this process. What takes long to read is left out.

    Args:
        proc: where Linux shows processes.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._schedule, self._stat = proc / "thread-self/schedstat", proc / "stat"
        begin = time.perf_counter()
        self._stolen()
        # On a node of hundreds of processors this file takes milliseconds.
        self._reads_stat = time.perf_counter() - begin < CHEAP

    def read(self) -> Disturbances:
        """The counters now."""
        process = resource.getrusage(resource.RUSAGE_SELF)
        thread = resource.getrusage(resource.RUSAGE_THREAD)
        return Disturbances(
            process.ru_minflt,
            process.ru_majflt,
            thread.ru_stime,
            process.ru_nivcsw,
            self._delayed(),
            self._stolen() if self._reads_stat else math.nan,
        )

    def _delayed(self) -> float:
        with suppress(OSError, ValueError, IndexError):
            return int(self._schedule.read_text(encoding="utf-8").split()[1]) / 1e9
        return math.nan

    def _stolen(self) -> float:
        with suppress(OSError, ValueError, IndexError):
            lines = dict(
                line.split(" ", 1) for line in self._stat.read_text(encoding="utf-8").splitlines()
            )
            mine = [lines[f"cpu{number}"] for number in os.sched_getaffinity(0)]
            return sum(int(line.split()[7]) for line in mine) / TICKS
        return math.nan


def frequency(devices: Path = DEVICES) -> float:
    """The frequency of this process's fastest processor in Hz; NaN where it cannot be read."""
    found = []
    for number in os.sched_getaffinity(0):
        with suppress(OSError, ValueError):
            path = devices / f"cpu{number}/cpufreq/scaling_cur_freq"
            found.append(1e3 * int(path.read_text(encoding="utf-8")))
    return max(found, default=math.nan)


def temperature(sensors: Path = SENSORS) -> float:
    """The temperature of the hottest processor in degrees Celsius; NaN where it is unknown."""
    found = []
    for chip in sorted(sensors.glob("hwmon*")):
        with suppress(OSError, ValueError):
            if (chip / "name").read_text(encoding="utf-8").strip() in (
                "coretemp",
                "k10temp",
                "zenpower",
            ):
                inputs = chip.glob("temp*_input")
                found += [int(one.read_text(encoding="utf-8")) / 1e3 for one in inputs]
    return max(found, default=math.nan)
