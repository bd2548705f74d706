"""Durable files: what has been reported as written survives a crash of the machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

LARGEST_CALL = 1 << 30  # bytes of a call: systems take less than 2 GiB at a time


def call(name: str, function: Callable[..., T], *arguments: Any) -> T:
    """Make one call to the file system.

    Whatever a checkpoint writes goes through here. So tests can end the process at any call, let it
    fail, or keep a record of what a machine that loses power may have lost.

    Args:
        name: what the call does: create, reserve, open, write, sync, close, read, list, rename,
            unlink, append; through MPI-IO with mpi_ before it.
        function: what does it.
        arguments: of the function.
    """
    return function(*arguments)


def write_at(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all of the data at a byte offset, however many calls that takes."""
    rest = memoryview(data)
    while rest:
        count = call("write", os.pwrite, descriptor, rest[:LARGEST_CALL], offset)
        if not count:
            raise OSError(errno.EIO, "nothing was written")
        rest, offset = rest[count:], offset + count


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Fill memory from an offset on; returns the bytes read, fewer only at the file's end."""
    rest = memory
    while rest:
        count = call("read", os.preadv, descriptor, [rest[:LARGEST_CALL]], offset)
        if not count:
            break
        rest, offset = rest[count:], offset + count
    return len(memory) - len(rest)


def read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """So many bytes from an offset, or as many as the file has."""
    data = bytearray(nbytes)
    return bytes(data[: read_into(descriptor, memoryview(data), offset)])


def begin_writing(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the system write to the disk now, while more is computed, what it would keep to itself.

    On Linux this advice starts writing dirty pages; fsync, which comes later, has less to wait for.
    """
    with suppress(OSError):  # advice: some file systems have none
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a file or folder, to read from."""
    descriptor = call("open", os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        call("close", os.close, descriptor)


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's entries, to the disk."""
    with opened(path) as descriptor:
        call("sync", os.fsync, descriptor)


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk, on file systems that can do so for a folder alone."""
    try:
        sync(path)
    except OSError as error:
        if error.errno != errno.EINVAL:  # by which others refuse: their entries need no such call
            raise


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder within its folder; it is durable when this returns."""
    call("rename", os.rename, source, target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with suppress(FileNotFoundError):
        call("unlink", os.unlink, path)


def reserve(descriptor: int, begin: int, nbytes: int) -> None:
    """Claim the space of a range, of which the file gets the length at least.

    Where the file system cannot claim space, the C library's posix_fallocate would write to every
    block of it, which on a network takes hours; there the file gets its length only.
    """
    import ctypes  # not for commands that only read

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, 0, ctypes.c_int64(begin), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
        os.ftruncate(descriptor, begin + nbytes)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that its readers see the old or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = call("create", os.open, partial, flags, 0o666)
    try:
        write_at(descriptor, text.encode(), 0)
        call("sync", os.fsync, descriptor)
    finally:
        call("close", os.close, descriptor)
    rename(partial, path)
