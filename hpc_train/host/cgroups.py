"""The cgroups of this process, whose files say what it may use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cgroups_around(
    controller: str, root: Path = CGROUPS, own: Path = OWN_CGROUPS
) -> list[tuple[int, Path]]:
    """The folders of this process's cgroups and of those around them, each with its version.

    In a container the limit may be that of the root.

    Args:
        controller: what they limit, such as memory. Cgroups of version 2 limit all.
        root: where cgroups are mounted.
        own: names the cgroups of this process.
    """
    found: list[tuple[int, Path]] = []
    with suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                version, top = 2, root
            elif controller in controllers.split(","):
                version, top = 1, root / controller
            else:
                continue
            group = top / path.strip("/")
            around = (group, *group.parents)
            found += [(version, one) for one in around if one == root or root in one.parents]
    return found
