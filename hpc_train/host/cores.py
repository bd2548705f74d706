"""Physical cores: a core with two hardware threads computes about as fast as one with one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpc_train.files import system_text
from hpc_train.host.cgroups import CGROUPS, OWN_CGROUPS, cgroups_around

CPUS = Path("/sys/devices/system/cpu")


def physical_cores(cpus: Iterable[int], root: Path = CPUS) -> set[str]:
    """The cores of these hardware threads; each is named by the list of its threads.

    Where Linux does not tell which threads share a core, each one counts for a core.

    Args:
        cpus: hardware threads, as `os.sched_getaffinity` numbers them.
        root: takes the place of /sys/devices/system/cpu.
    """
    siblings = {cpu: root / f"cpu{cpu}/topology/thread_siblings_list" for cpu in cpus}
    return {system_text(path) or str(cpu) for cpu, path in siblings.items()}


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float:
    """How many CPUs' time this process's cgroups allow, as in containers; infinite if all.

    Args:
        root: where cgroups are mounted.
        own: names the cgroups of this process.
    """
    fewest = math.inf
    for version, group in cgroups_around("cpu", root, own):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with suppress(ValueError, ZeroDivisionError):  # there is no limit
            quota, period = map(int, " ".join(system_text(group / name) for name in files).split())
            fewest = min(fewest, quota / period if quota > 0 else math.inf)
    return fewest
