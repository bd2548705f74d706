"""Durable file operations: a file that is reported as written survives a crash of the machine."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

LARGEST_CALL = 1 << 30  # bytes per call: operating systems take less than 2 GiB


def call(name: str, function: Callable[..., T], *arguments: Any) -> T:
    """Make one call to the file system.

    Everything that a checkpoint writes goes through here. So tests can end the process at any call,
    let the call fail, or record which data a machine could lose if its power fails.

    Args:
        name: kind of the call: create, reserve, open, write, sync, close, read, list, rename,
            unlink, append; with mpi_ before it for calls to MPI-IO.
        function: the function to call.
        arguments: arguments of the function.
    """
    return function(*arguments)


def write_at(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all of the data at a byte offset, in as many calls as needed.

    Raises:
        OSError: the file system takes no more data.
    """
    rest = memoryview(data)
    while rest:
        count = call("write", os.pwrite, descriptor, rest[:LARGEST_CALL], offset)
        if not count:
            raise OSError(errno.EIO, "the file system has written nothing")
        rest, offset = rest[count:], offset + count


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Fill memory with the bytes from an offset on.

    Returns:
        The number of bytes read. It is less than the memory's size only if the file ends before.
    """
    rest = memory
    while rest:
        count = call("read", os.preadv, descriptor, [rest[:LARGEST_CALL]], offset)
        if not count:
            break
        rest, offset = rest[count:], offset + count
    return len(memory) - len(rest)


def read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read `nbytes` bytes from an offset on, or fewer if the file ends before."""
    data = bytearray(nbytes)
    return bytes(data[: read_into(descriptor, memoryview(data), offset)])


def begin_writing(descriptor: int, offset: int, nbytes: int) -> None:
    """Make the system begin to write a range to the disk, so that a later fsync takes less time."""
    # On Linux this advice starts writing dirty pages. Some file systems know no advice.
    with suppress(OSError):
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
    """Write a file's content, or a folder's entries, to the disk (fsync)."""
    with opened(path) as descriptor:
        call("sync", os.fsync, descriptor)


def sync_folder(path: Path) -> None:
    """Write a folder's entries to the disk, on file systems that need a call for it."""
    try:
        sync(path)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the answer of file systems that need no such call
            raise


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder within its folder; the new name is durable when this returns."""
    call("rename", os.rename, source, target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a file, if it exists."""
    with suppress(FileNotFoundError):
        call("unlink", os.unlink, path)


def reserve(descriptor: int, begin: int, nbytes: int) -> None:
    """Reserve space on the disk for a range of a file; the file becomes long enough to hold it.

    If the file system cannot reserve space, the file only gets its length.

    Raises:
        OSError: there is not enough space.
    """
    import ctypes  # here, because commands that only read do not need it

    # Not by os.posix_fallocate: if the file system cannot reserve space, the C library would write
    # to every block of the range, which takes hours over a network.

    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(descriptor, 0, ctypes.c_int64(begin), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.ftruncate(descriptor, begin + nbytes)
            return
        if number != errno.EINTR:  # a signal came: try again
            raise OSError(number, os.strerror(number))


def is_there(path: Path) -> bool:
    """Whether there is such a file; False, too, where the file system gives an error."""
    return os.path.exists(path)  # noqa: PTH110  # Path.exists raises such an error


def create(path: Path, parts: Iterable[Buffer], flag: int, mode: int = 0o666) -> None:
    """Make a file and write its content. The content is durable when this returns, the name is not.

    Args:
        path: the file.
        parts: the content, in parts.
        flag: os.O_EXCL if the file must not exist yet, os.O_TRUNC if its old content goes.
        mode: the rights of a new file, before the umask.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag
    descriptor = call("create", os.open, path, flags, mode)
    try:
        offset = 0
        for part in parts:
            write_at(descriptor, part, offset)
            offset += len(part)
        call("sync", os.fsync, descriptor)
    finally:
        call("close", os.close, descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old or the new content, never a part of it."""
    write_whole(path, [text.encode()])


def partial_name(path: Path) -> Path:
    """A new hidden name beside a file, for its content until that is complete.

    Two hosts may write the file at once, and in containers their processes have the same numbers.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def write_whole(path: Path, parts: Iterable[Buffer], mode: int = 0o666) -> None:
    """Do the same as `write_text` with bytes, also with more than fit into memory.

    Args:
        path: the file.
        parts: the content, in parts. They may come from the file itself.
        mode: the rights of the file, before the umask.
    """
    partial = partial_name(path)
    try:
        create(partial, parts, os.O_TRUNC, mode)
        rename(partial, path)
    except OSError:
        with suppress(OSError):  # a full disk needs its space
            partial.unlink()
        raise


def parsed_object(line: bytes | str) -> dict[str, Any] | None:
    """The object of a line of a file of JSON lines; None if it is damaged, cut off or no object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def lines_of(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, as far as it can be read.

    Args:
        path: the file, which need not exist.
        last_bytes: read only the lines that begin among these last bytes; None reads all.
    """
    with suppress(OSError), path.open("rb") as file:
        if last_bytes is not None and (size := os.fstat(file.fileno()).st_size) > last_bytes:
            file.seek(size - last_bytes)
            file.readline()  # the end of a line
        for line in file:
            found = parsed_object(line.decode(errors="replace"))
            if found is not None:
                yield found


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add an object to a file of JSON lines, also after a line that a full disk has cut off."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        whole = file.read(1) in (b"", b"\n")
        line = f"{json.dumps(record)}\n"
        file.write((line if whole else f"\n{line}").encode())


def system_text(path: Path | str) -> str:
    """The text of a small file of Linux, without blanks around it; "" where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # no /proc or /sys in this container
        return ""
