"""The memory that this process has used at most, and that its node has left."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from hpc_train.host.cgroups import CGROUPS, OWN_CGROUPS, cgroups_around

SHARED_EVERY = 60.0  # seconds between two looks at what is shared, which take long
_FILES = {  # of each version of cgroups: the limit, and what is used
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


def free_bytes(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Bytes that this node has left for this job: free ones, or what its cgroups still allow.

    Args:
        root: where cgroups are mounted.
        own: names the cgroup of this process.
    """
    left = psutil.virtual_memory().available
    for version, group in cgroups_around("memory", root, own):
        with suppress(OSError, ValueError):  # there is no limit
            left = min(left, _left(group, *_FILES[version]))
    return max(0, left)


def _left(group: Path, limit: str, usage: str) -> int:
    """What a cgroup still allows. The cache that it can drop does not count.

    Raises:
        OSError, ValueError: it has no limit.
    """
    stat = dict(
        line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
    )
    used = int((group / usage).read_text(encoding="utf-8")) - _dropped_at_need(stat)
    return int((group / limit).read_text(encoding="utf-8")) - used


def _dropped_at_need(stat: dict[str, str]) -> int:
    """Bytes of files in the page cache that the kernel drops as soon as memory is needed.

    They are on its two lists of file pages. Shared memory and tmpfs are not on these lists, and
    locked pages neither. Pages that first have to be written to a disk are left out.
    """

    def of(name: str, older: str) -> int:
        return int(stat.get(f"total_{older}", stat.get(name, 0)))

    cached = of("active_file", "active_file") + of("inactive_file", "inactive_file")
    return max(0, cached - of("file_dirty", "dirty") - of("file_writeback", "writeback"))


class PeakMemory:
    """The largest memory of this process since it was last asked.

    Memory that processes share counts by its proportional share, as in Linux's PSS. The kernel
    keeps the peak of all resident memory only. So the present excess of shared memory over this
    process's share of it is taken from the peak.
    """

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._excess = 0

    @staticmethod
    def can_be_measured() -> bool:
        """Whether the operating system tells the peak, and lets it be counted anew."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            return _kilobytes("/proc/self/status", "VmHWM") > 0
        return False

    def take(self) -> int:
        """Bytes at the peak since the last call; 0 where the operating system does not tell."""
        peak = _kilobytes("/proc/self/status", "VmHWM")
        now = time.monotonic()
        if now - self._looked > SHARED_EVERY:
            self._looked = now
            rollup = "/proc/self/smaps_rollup"
            self._excess = max(0, _kilobytes(rollup, "Rss") - _kilobytes(rollup, "Pss"))
        with suppress(OSError):
            # From now on the peak is counted anew.
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        return max(0, peak - self._excess) << 10


def _kilobytes(path: str | os.PathLike[str], key: str) -> int:
    with suppress(OSError):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
    return 0
