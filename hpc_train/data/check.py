"""Check that a data folder matches its manifest, without torch and without an HDF5 library.

`check_shards` is cheap and runs whenever a folder is opened. It compares each file's size, and
looks in the bytes before the data for the HDF5 fields that describe it. `damage` reads everything.
Nothing parses HDF5, because the HDF5 library ends the process at some damaged files.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpc_train import files
from hpc_train.data.blocks import block_hashes, damaged_block, ends_early, path_of, read_table
from hpc_train.data.manifest import (
    HASHED_BYTES,
    PREPARE_AGAIN,
    TOKEN_BYTES,
    StoredData,
    StoredShard,
)
from hpc_train.errors import DataError, HpcTrainError

S = TypeVar("S", bound=StoredShard)
SIGNATURE = b"\x89HDF\r\n\x1a\n"
NO_ADDRESS = (1 << 64) - 1  # HDF5's address of data that lie in another file
BEFORE_BYTES = 1 << 20  # most bytes before the data; HDF5 takes some KiB
PIECE_BYTES = 8 << 20  # a multiple of HASHED_BYTES
LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of the system, which says nothing of the file


def every_shard(manifest: StoredData[S]) -> list[S]:
    """The shards of all splits, in the manifest's order."""
    return [shard for shards in manifest.splits.values() for shard in shards]


def check_shards(
    directory: Path, manifest: StoredData[StoredShard], shards: Iterable[StoredShard] | None = None
) -> None:
    """Check shards without reading their data.

    Args:
        directory: the data folder.
        manifest: its manifest.
        shards: the shards to check; by default all.

    Raises:
        DataError: a shard is missing, truncated, or not the one that the manifest describes.
    """
    for shard in every_shard(manifest) if shards is None else shards:
        check_shard(directory / shard.name, shard, manifest.dtype)


def check_shard(path: Path, shard: StoredShard, dtype: str) -> None:
    """Check one shard without reading its data.

    Raises:
        DataError: as `check_shards`.
    """
    close_shard(open_shard(path, shard, dtype))


def open_shard(path: Path, shard: StoredShard, dtype: str) -> dict[str, int]:
    """Open a shard and check it without reading its data.

    Returns:
        For each dataset a descriptor of the file that has it. `close_shard` closes them.

    Raises:
        DataError: as `check_shards`.
        HpcTrainError: the system opens no more files.
    """
    with ExitStack() as held:
        own = _opened(held, path)
        try:
            _check(own, path, shard, dtype)
        except OSError as error:
            raise unreadable_shard(path, error) from None
        found = dict.fromkeys(shard.extents(dtype), own)
        if shard.source:
            source = path_of(path, shard, "tokens")
            found["tokens"] = _opened(held, source)
            _check_source(found["tokens"], source, shard, dtype)
        held.pop_all()
    return found


def close_shard(descriptors: Mapping[str, int]) -> None:
    """Close what `open_shard` has opened."""
    for descriptor in {*descriptors.values()}:
        os.close(descriptor)


def _opened(held: ExitStack, path: Path) -> int:
    try:  # O_NONBLOCK, because opening a pipe that nobody writes to would wait forever
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        if path.is_symlink():
            lost = f"{path.resolve()} is missing, to which {path} links"
            raise DataError(lost, "put it back, or prepare the data again") from None
        raise DataError(f"shard {path} is missing", PREPARE_AGAIN) from None
    except OSError as error:
        raise unreadable_shard(path, error) from None
    held.callback(os.close, descriptor)
    return descriptor


def _check_source(descriptor: int, path: Path, shard: StoredShard, dtype: str) -> None:
    """Check that the file of others that has a shard's tokens is long enough."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path.resolve()} is not a file", PREPARE_AGAIN)
    if found.st_size < sum(next(iter(shard.extents(dtype).values()))):
        raise DataError(
            f"{path.resolve()} has {found.st_size} bytes, fewer than when {shard.name} was made",
            PREPARE_AGAIN,
        )


def _check(descriptor: int, path: Path, shard: StoredShard, dtype: str) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"shard {path} is not a file", PREPARE_AGAIN)
    if found.st_size != shard.file_bytes:
        raise DataError(
            f"shard {path} has {found.st_size} bytes, its manifest says {shard.file_bytes}",
            PREPARE_AGAIN,
        )
    extents = [*shard.extents(dtype).values()][1 if shard.source else 0 :]
    begin = min(offset for offset, nbytes in extents if nbytes)
    if begin > BEFORE_BYTES:
        raise _foreign(path)
    before = files.read_at(descriptor, begin, 0)
    if not before.startswith(SIGNATURE):
        raise DataError(f"shard {path} is damaged (it is not an HDF5 file)", PREPARE_AGAIN)
    if not all(any(_has(before, form) for form in label) for label in _labels(shard, dtype)):
        raise _foreign(path)


def _has(content: bytes, wanted: bytes) -> bool:
    """Whether some bytes are in others.

    It looks for their first byte, which Python finds much faster than several in a row. Headers
    are mostly zeros, so that byte must be another one.
    """
    first, at = wanted[:1], -1
    while (at := content.find(first, at + 1)) >= 0:
        if content.startswith(wanted, at):
            return True
    return False


def unreadable_shard(path: Path, error: OSError) -> HpcTrainError:
    """The error for a shard that the system does not open or read."""
    if error.errno in LACK:
        return HpcTrainError(f"shard {path}: {error.strerror}", "run with fewer ranks on a node")
    return DataError(f"shard {path}: {error.strerror}", "make it readable, or copy it again")


def _foreign(path: Path) -> DataError:
    return DataError(f"shard {path} is not the one its manifest describes", PREPARE_AGAIN)


def _labels(shard: StoredShard, dtype: str) -> list[list[bytes]]:
    """What an HDF5 file with this data holds before it: fields, each with its possible forms.

    The fields are those of the HDF5 file format specification, IV.A.2: the fixed-point datatype of
    tokens (class 0, little-endian) and contiguous layouts (class 1, address, size), each with its
    version before it. The hash is an attribute, which is text.
    """
    kinds = []
    if size := TOKEN_BYTES.get(dtype):
        kind = bytes(3) + size.to_bytes(4, "little") + bytes(2) + (8 * size).to_bytes(2, "little")
        kinds = [[version + kind for version in (b"\x10", b"\x20", b"\x30", b"\x40")]]
    extents = shard.extents(dtype)
    if shard.source:
        extents["tokens"] = NO_ADDRESS, shard.nbytes(dtype)
    places = [
        begin.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
        for begin, nbytes in extents.values()
        if nbytes
    ]
    return [
        *kinds,
        *([version + place for version in (b"\x03\x01", b"\x04\x01")] for place in places),
        [shard.hash.encode()],
    ]


def damage(
    path: Path, shard: StoredShard, dtype: str, tell: Callable[[int], None] = lambda count: None
) -> str | None:
    """Read all blocks of a shard and compare their hashes. Takes 8 MiB of memory.

    Args:
        path: the shard's file.
        shard: the manifest's entry for it.
        dtype: the tokens' type.
        tell: is called after each piece of the first dataset with the piece's number of bytes.

    Returns:
        What is wrong with the shard, in words; None if nothing is.
    """
    try:
        descriptors = open_shard(path, shard, dtype)
        try:
            table = read_table(descriptors["hashes"], path, shard, dtype)
            for name, extent in [*shard.extents(dtype).items()][:-1]:
                blocks = -(-extent[1] // HASHED_BYTES)
                hashed = extent, table[:blocks]
                _compare(descriptors[name], path, shard, name, hashed, tell)
                table, tell = table[blocks:], lambda count: None
        finally:
            close_shard(descriptors)
    except DataError as error:
        return error.cause
    except OSError as error:
        return f"shard {path}: {error.strerror}"
    return None


def _compare(
    descriptor: int,
    path: Path,
    shard: StoredShard,
    name: str,
    hashed: tuple[tuple[int, int], np.ndarray],
    tell: Callable[[int], None],
) -> None:
    (begin, nbytes), table = hashed
    piece = memoryview(bytearray(min(PIECE_BYTES, nbytes)))
    for done in range(0, nbytes, PIECE_BYTES):
        part = piece[: nbytes - done]
        if files.read_into(descriptor, part, begin + done) < len(part):
            raise ends_early(path)
        found, first = block_hashes(part), done // HASHED_BYTES
        wrong = np.flatnonzero(found != table[first : first + len(found)])
        if wrong.size:
            raise damaged_block(path, shard, name, first + int(wrong[0]))
        tell(len(part))
