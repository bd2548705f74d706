"""Check that a data folder matches its manifest, without torch and without an HDF5 library.

`check_shards` is cheap and runs whenever a folder is opened. It compares each file's size, and
looks in the bytes around the tokens for the HDF5 fields that describe these tokens. `damage` reads
all tokens. Nothing parses HDF5, because the HDF5 library ends the process at some damaged files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from hpc_train import files
from hpc_train.data.manifest import PREPARE_AGAIN, TOKEN_BYTES, Manifest, Shard
from hpc_train.errors import DataError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
AROUND_BYTES = 1 << 20  # most bytes before the tokens, and behind them; HDF5 takes some KiB
PIECE_BYTES = 8 << 20


def every_shard(manifest: Manifest) -> list[Shard]:
    """The shards of all splits, in the manifest's order."""
    return [shard for shards in manifest.splits.values() for shard in shards]


def check_shards(
    directory: Path, manifest: Manifest, shards: Iterable[Shard] | None = None
) -> None:
    """Check shards without reading their tokens.

    Args:
        directory: the data folder.
        manifest: its manifest.
        shards: the shards to check; by default all.

    Raises:
        DataError: a shard is missing, truncated, or not the one that the manifest describes.
    """
    for shard in every_shard(manifest) if shards is None else shards:
        check_shard(directory / shard.name, shard, manifest.dtype)


def check_shard(path: Path, shard: Shard, dtype: str) -> None:
    """Check one shard without reading its tokens.

    Raises:
        DataError: as `check_shards`.
    """
    descriptor = _open(path)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"shard {path} is not a file", PREPARE_AGAIN)
        if found.st_size != shard.file_bytes:
            raise DataError(
                f"shard {path} has {found.st_size} bytes, its manifest says {shard.file_bytes}",
                PREPARE_AGAIN,
            )
        end = shard.offset + shard.nbytes(dtype)
        if max(shard.offset, shard.file_bytes - end) > AROUND_BYTES:
            raise _foreign(path)
        before = files.read_at(descriptor, shard.offset, 0)
        behind = files.read_at(descriptor, shard.file_bytes - end, end)
    except OSError as error:
        raise DataError(f"shard {path}: {error.strerror}", "check the file system") from None
    finally:
        os.close(descriptor)
    if not before.startswith(SIGNATURE):
        raise DataError(f"shard {path} is damaged (it is not an HDF5 file)", PREPARE_AGAIN)
    around = before + behind
    if not all(re.search(label, around, re.DOTALL) for label in _labels(shard, dtype)):
        raise _foreign(path)


def _open(path: Path) -> int:
    try:  # O_NONBLOCK, because opening a pipe that nobody writes to would wait forever
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DataError(f"shard {path} is missing", PREPARE_AGAIN) from None
    except OSError as error:
        raise DataError(f"shard {path}: {error.strerror}", "make it readable") from None


def _foreign(path: Path) -> DataError:
    return DataError(f"shard {path} is not the one its manifest describes", PREPARE_AGAIN)


def _labels(shard: Shard, dtype: str) -> list[bytes]:
    """Regular expressions for what an HDF5 file with these tokens holds around them.

    The fields are those of the HDF5 file format specification, IV.A.2: a fixed-point datatype
    (class 0, little-endian, unsigned) and a contiguous layout (class 1, address, size), each
    with its version before it. The hash is an attribute, which is text.
    """
    size = TOKEN_BYTES[dtype]
    kind = size.to_bytes(4, "little") + bytes(2) + (8 * size).to_bytes(2, "little")
    place = shard.offset.to_bytes(8, "little") + shard.nbytes(dtype).to_bytes(8, "little")
    return [
        rb"[\x10\x20\x30\x40]\0\0\0" + re.escape(kind),
        rb"[\x03\x04]\x01" + re.escape(place),
        re.escape(shard.hash.encode()),
    ]


def damage(
    path: Path, shard: Shard, dtype: str, tell: Callable[[int], None] = lambda count: None
) -> str | None:
    """Read all tokens of a shard and compare their hash. Takes 8 MiB of memory.

    Args:
        path: the shard's file.
        shard: the manifest's entry for it.
        dtype: the tokens' type.
        tell: is called after each piece with the piece's number of bytes.

    Returns:
        What is wrong with the shard, in words; None if nothing is.
    """
    try:
        check_shard(path, shard, dtype)
        found = xxhash.xxh3_128()
        begin, end = shard.offset, shard.offset + shard.nbytes(dtype)
        with files.opened(path) as descriptor:
            piece = memoryview(bytearray(min(PIECE_BYTES, end - begin)))
            while begin < end:
                part = piece[: end - begin]
                if files.read_into(descriptor, part, begin) < len(part):
                    return f"shard {path} ends early"
                found.update(part)
                begin += len(part)
                tell(len(part))
    except DataError as error:
        return error.cause
    except OSError as error:
        return f"shard {path}: {error.strerror}"
    if found.hexdigest() != shard.hash:
        return f"shard {path} is damaged: its tokens do not have the hash {shard.hash}"
    return None
