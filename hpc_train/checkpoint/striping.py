"""Spread a checkpoint over the servers of a Lustre file system, where there is one.

Lustre tells and takes a file's stripes as an extended attribute, so this starts no program: a
process that communicates through MPI must not.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

from hpc_train import files
from hpc_train.checkpoint.fileformat import EXTENT_BYTES, STRIPED_BYTES

logger = logging.getLogger(__name__)

# Stripes by size of a shared file, in bytes: NERSC's recommendation for Lustre
# (docs.nersc.gov, "Lustre file striping"). Smaller files stay on one server.
COUNTS = ((100 * 10**9, 72), (10 * 10**9, 24), (STRIPED_BYTES, 8))

ATTRIBUTE = "lustre.lov"
# lov_user_md_v1 of Lustre's lustre_user.h: magic number, pattern, the file's id (not to be set),
# bytes of a stripe, number of stripes, first server.
LAYOUT = struct.Struct("=II16xIHH")
MAGIC, MAGIC_WITH_POOL = 0x0BD10BD0, 0x0BD30BD0
RAID0 = 1
ANY_SERVER = 0xFFFF


def create(path: Path, nbytes: int) -> bool:
    """Make an empty file with stripes as long as an extent; returns whether it was made.

    Stripes can only be chosen while a file has no content and was not opened. What the system made
    of it is read back, since it may have fewer servers than asked for.
    """
    if not _is_lustre(path.parent):
        return False
    count = next((stripes for size, stripes in COUNTS if nbytes > size), 1)
    try:
        files.call("create", os.mknod, path, stat.S_IFREG | 0o666)
        os.setxattr(path, ATTRIBUTE, LAYOUT.pack(MAGIC, RAID0, EXTENT_BYTES, count, ANY_SERVER))
    except OSError:
        with suppress(OSError):  # who makes it without stripes finds out
            files.remove(path)
        return False
    found = _count(path)
    if found != count:
        logger.info("%s has %s stripes, %d were asked for", path, found, count)
    return True


def _is_lustre(folder: Path) -> bool:
    try:
        os.getxattr(folder, ATTRIBUTE)
    except OSError as error:
        return error.errno == errno.ENODATA  # it has no stripes of its own
    return True


def _count(path: Path) -> int | None:
    """The number of a file's stripes, if Lustre tells it."""
    with suppress(OSError, struct.error):
        magic, _, _, count, _ = LAYOUT.unpack_from(os.getxattr(path, ATTRIBUTE))
        return int(count) if magic in (MAGIC, MAGIC_WITH_POOL) else None
    return None
