"""Physical cores: a core with two hardware threads computes about as fast as one with one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def physical_cores(cpus: Iterable[int], root: Path = CPUS) -> set[str]:
    """The cores of these hardware threads; each is named by the list of its threads.

    Where Linux does not tell which threads share a core, each one counts for a core.

    Args:
        cpus: hardware threads, as `os.sched_getaffinity` numbers them.
        root: takes the place of /sys/devices/system/cpu.
    """
    return {_siblings(root / f"cpu{cpu}") or str(cpu) for cpu in cpus}


def _siblings(cpu: Path) -> str:
    try:
        return (cpu / "topology/thread_siblings_list").read_text().strip()
    except OSError:  # no /sys in this container
        return ""
