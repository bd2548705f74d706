"""Physical cores: a core with two hardware threads computes about as fast as one with one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpc_train.files import system_text

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
