"""One rank reads a checkpoint file's header and extents and verifies them, without torch.

A file system may fail for a moment. A file that cannot be read at the moment is not damaged: going
back to an older checkpoint would lose work.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import xxhash

from hpc_train import files
from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.fileformat import MAX_HEADER_BYTES, FileMap
from hpc_train.errors import CheckpointError, CheckpointMismatch, CheckpointUnreadable

T = TypeVar("T")
logger = logging.getLogger(__name__)

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
LASTING = frozenset(  # errors that a further attempt does not mend
    {
        *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
        errno.ENAMETOOLONG,
    }
)
ZIP = b"PK\x03\x04"  # the first bytes of what torch.save writes
PIECE = 1 << 20  # bytes read at once: they are still in the core's cache when they are hashed
BROKEN = "it is damaged: use an older one, or delete it"
UNREADABLE = "it need not be damaged: look after the file system, and start again"
GONE = (
    "if a run has removed it, as newer checkpoints are kept, give a newer one; otherwise see that "
    "this host has its folder"
)


def retried(path: Path, work: Callable[[], T]) -> T:
    """Do something with a path, again and again if that fails; returns what `work` returns.

    Args:
        path: the file or folder, for the log.
        work: an OSError of it that may pass, such as a stale handle, leads to another attempt.

    Raises:
        OSError: the last attempt failed, or the error is one that does not pass.
    """
    pauses = list(PAUSES)
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno in LASTING or not pauses:
                raise
            pause = pauses.pop(0)
            cause = error.strerror or error
            logger.warning("%s: %s; it is read again in %g s", path, cause, pause)
            time.sleep(pause)


def patiently(path: Path, work: Callable[[int], T]) -> T:
    """Read a file as `retried`; returns what `work` returns.

    Args:
        path: the file. Each attempt opens it anew.
        work: reads from the descriptor that it is given.

    Raises:
        CheckpointUnreadable: the last attempt failed, or the error is one that does not pass.
    """

    def opened() -> T:
        with files.opened(path) as descriptor:
            return work(descriptor)

    try:
        return retried(path, opened)
    except OSError as error:
        raise CheckpointUnreadable(
            f"checkpoint {path} cannot be read ({error.strerror or error})",
            GONE if error.errno == errno.ENOENT else UNREADABLE,
        ) from error


def read_header(path: Path) -> tuple[FileMap, bytes]:
    """Read and check a file's header and hash table; returns its layout and the extents' hashes.

    Raises:
        CheckpointMismatch: another program wrote the file, or its format has another version.
        CheckpointUnreadable: the file is missing, or the file system cannot read it.
        CheckpointError: the file was never completed, or it is damaged.
    """
    try:
        layout, table, table_hash = patiently(path, _header_and_table)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{path}: {error.cause}", error.remedy) from None
    except CheckpointUnreadable:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error.cause}", BROKEN) from None
    if fileformat.hash_of(table).hex() != table_hash:
        raise CheckpointError(f"checkpoint {path}: its hash table is wrong", BROKEN)
    return layout, table


def _header_and_table(descriptor: int) -> tuple[FileMap, bytes, str]:
    """The layout, the hash table, and the hash that the table must have, hexadecimal."""
    size = files.call("size", os.fstat, descriptor).st_size
    first = files.read_at(descriptor, 8, 0)
    if first.startswith(ZIP):
        raise CheckpointMismatch(
            "it is an archive, as torch.save writes it, and no checkpoint of hpc_train",
            fileformat.GIVE_CHECKPOINT,
        )
    length = int.from_bytes(first, "little")
    if not length:
        raise CheckpointError("it was never completed")
    if length > min(size, MAX_HEADER_BYTES + fileformat.FILE_ALIGNMENT):
        raise CheckpointError("a part of it is missing, or its first bytes are wrong")
    layout, table_hash = fileformat.parse_header(files.read_at(descriptor, length, 8), size)
    begin = layout.data_start + layout.content_bytes
    return layout, files.read_at(descriptor, layout.file_bytes - begin, begin), table_hash


def read_extent(
    descriptor: int, layout: FileMap, number: int, expected: bytes, into: memoryview | None = None
) -> bool:
    """Read an extent; returns whether it has the expected hash.

    Args:
        descriptor: of the file, open for reading.
        layout: of the file.
        number: which extent.
        expected: its hash.
        into: memory for it. Without any, the extent is only hashed.
    """
    begin, end = layout.extent(number)
    spare = memoryview(bytearray(min(PIECE, end - begin)))
    hashed = xxhash.xxh3_128()
    for first in range(begin, end, PIECE):
        last = min(first + PIECE, end)
        piece = spare if into is None else into[first - begin :]
        piece = piece[: last - first]
        if files.read_into(descriptor, piece, layout.data_start + first) < len(piece):
            return False
        hashed.update(piece)
    return hashed.digest() == expected
