"""Spread a checkpoint over the servers of a Lustre file system, where there is one."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

from hpc_train.checkpoint.fileformat import EXTENT_BYTES

logger = logging.getLogger(__name__)

# Stripes by size of a shared file, in GB: NERSC's recommendation for Lustre
# (docs.nersc.gov, "Lustre file striping"). Smaller files stay on one server.
COUNTS = ((100, 72), (10, 24), (1, 8))
SECONDS = 30


def create(path: Path, nbytes: int) -> bool:
    """Make an empty file with stripes as long as an extent; returns whether it was made.

    Stripes can only be chosen when a file is made. What the system made of it is read back, since
    it may have fewer servers than asked for.
    """
    lfs = shutil.which("lfs")
    if lfs is None or _ran(lfs, "getstripe", "-d", path.parent) is None:
        return False  # another file system
    count = next((stripes for gigabytes, stripes in COUNTS if nbytes > gigabytes * 10**9), 1)
    if _ran(lfs, "setstripe", "-c", str(count), "-S", str(EXTENT_BYTES), path) is None:
        return False
    found = _ran(lfs, "getstripe", "-c", path)
    if found != str(count):
        logger.info("%s has %s stripes, %d were asked for", path, found, count)
    return True


def _ran(*command: object) -> str | None:
    """What a command prints; None if it failed."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
