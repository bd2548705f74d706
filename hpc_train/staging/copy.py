"""The copy on one node: the room for it, its files, its check, its end."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hpc_train import files
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.staging.listing import Item, Listing, from_text, to_text
from hpc_train.staging.stream import Stream

TABLE_FILE = "table.json"  # in the folder of a whole copy: what it consists of
SECOND = 10**9  # nanoseconds; not every file system keeps parts of it


def room_needed(items: Sequence[Item], block: int) -> int:
    """Bytes that a copy takes on a disk with blocks of `block` bytes.

    Each item counts for a block more, for its name and what the file system notes about it.
    """
    return sum(-(-item.nbytes // block) + 1 for item in items) * block


def check_room(folder: Path, items: Sequence[Item]) -> None:
    """Check that the disk of a folder has room for a copy.

    Raises:
        UserError: it has not.
    """
    disk = os.statvfs(folder)
    needed, free = room_needed(items, disk.f_frsize), disk.f_bavail * disk.f_frsize
    remedy = "give another folder with --to, or stage less"
    if needed > free:
        raise UserError(
            f"{folder} has {amount(free)} free, and {amount(needed)} are needed", remedy
        )
    # Some file systems make room for a file's name when they need it, and say that they have none.
    if disk.f_files and len(items) > disk.f_favail:
        raise UserError(
            f"{folder} can take {disk.f_favail} more files, and {len(items)} are needed", remedy
        )


def amount(nbytes: int) -> str:
    """An amount of data, for people."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**7 else f"{nbytes / 1e6:.3f} MB"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Run a block that writes into a folder.

    Raises:
        UserError: the file system refuses something.
    """
    try:
        yield
    except OSError as error:
        where = f"{folder} ({error.filename})" if error.filename else str(folder)
        raise UserError(f"{where}: {error.strerror}", "give another folder with --to") from None


def make_folder(folder: Path) -> None:
    """Make the folder of the copy, or take one that is there.

    Raises:
        UserError: the folder that it lies in is not there, it cannot be made, or another user has
            made it.
    """
    with writing(folder):
        if not folder.parent.is_dir():  # a mistake in its name could lead to a disk of the system
            raise UserError(
                f"{folder.parent} is not a folder on this node",
                "give --to a folder that each node has",
            )
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise UserError(f"{folder} is not a folder of yours", "give another folder with --to")


def lock(folder: Path) -> int:
    """Have others refused here; returns a descriptor that ends this when it is closed.

    Raises:
        UserError: another one has the lock.
    """
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"another `hpc-train stage` uses {folder} now", "try again when it has ended"
        ) from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def empty(folder: Path) -> None:
    """Remove what is in a folder. The folder itself stays, because it may be locked.

    Raises:
        UserError: something in it cannot be removed.
    """
    with _removing(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                Path(entry.path).unlink(missing_ok=True)


def remove_copy(folder: Path) -> bool:
    """Remove a copy, or a part of one; returns whether there was any.

    Raises:
        UserError: something in it cannot be removed.
    """
    if not os.path.lexists(folder):
        return False
    with _removing(folder):
        shutil.rmtree(folder)
    return True


@contextmanager
def _removing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be removed ({error.strerror or error})", "remove it by hand"
        ) from None


class Copy:
    """Writes a copy on one node.

    Args:
        folder: where it belongs; it exists.
        found: what it consists of, and where that is copied from.
        stream: the chunks that have its bytes.
    """

    def __init__(self, folder: Path, found: Listing, stream: Stream) -> None:
        self.folder, self.items, self.stream = folder, found.items, stream
        self._found = found
        self._finished: set[Item] = set()

    def begin(self) -> None:
        """Make all folders, links and empty files.

        Raises:
            UserError: the disk does not take them.
        """
        with writing(self.folder):
            for item in self.items:
                path = self._path(item)
                if stat.S_ISDIR(item.mode):
                    Path(path).mkdir(mode=0o700, parents=True)
                elif stat.S_ISLNK(item.mode):
                    os.symlink(item.link, path)
                    os.utime(path, ns=(item.mtime_ns,) * 2, follow_symlinks=False)
                elif not item.size and not item.link:
                    os.close(_open(path))

    def write(self, number: int, memory: memoryview) -> None:
        """Write the files' parts that are in a chunk. Several threads may.

        Raises:
            UserError: the disk does not take them.
        """
        with writing(self.folder):
            for portion in self.stream.portions(number):
                descriptor = _open(self._path(portion.item))
                try:
                    part = memory[portion.at : portion.at + portion.nbytes]
                    files.write_at(descriptor, part, portion.offset)
                    if portion.nbytes == portion.item.size:
                        _finish(descriptor, portion.item)
                        self._finished.add(portion.item)
                finally:
                    os.close(descriptor)

    def finish(self) -> None:
        """Give everything its other names, permissions and times, check it, and note it as whole.

        Raises:
            UserError: the disk does not take it.
            HpcTrainError: something is not there, or differs.
        """
        with writing(self.folder):
            for item in self.items:
                if stat.S_ISREG(item.mode) and item.link:
                    os.link(f"{self.folder}/{item.link}", self._path(item))
            for item in reversed(self.items):  # a new item changes the time of its folder
                if item not in self._finished and not stat.S_ISLNK(item.mode):
                    _finish(self._path(item), item)
            (self.folder / TABLE_FILE).write_text(to_text(self._found), encoding="utf-8")

    def whole(self) -> bool:
        """Whether the folder has a whole copy of exactly these items, perhaps with more."""
        noted = self._noted()
        return (noted.folders, noted.items) == (self._found.folders, self.items) and all(
            _matches(self._path(item), item) for item in self.items
        )

    def check_others(self) -> None:
        """Check that the folder has no whole copy of other folders, which programs may be using.

        Raises:
            UserError: it has.
        """
        there = self._noted().folders
        if there and there != self._found.folders:
            raise UserError(
                f"{self.folder} has copies of {', '.join(map(str, there.values()))}, which may be "
                "in use",
                "name all folders in one `hpc-train stage`, or first remove all nodes' copies, "
                "as you staged them, by "
                f"`hpc-train stage --clean --to {self.folder.parent}`",
            )

    def _noted(self) -> Listing:
        """What the whole copy in the folder consists of; nothing if there is none."""
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            return from_text((self.folder / TABLE_FILE).read_text(encoding="utf-8"))
        return Listing({}, [])

    def _path(self, item: Item) -> str:
        return f"{self.folder}/{item.path}"


def permissions(item: Item) -> int:
    """The permissions of an item in the copy: its own, and folders can always be removed."""
    return stat.S_IMODE(item.mode) | (0o700 if stat.S_ISDIR(item.mode) else 0)


def _finish(file: int | str, item: Item) -> None:
    """Give a file or folder the permissions and the time of an item, and check its kind and size.

    Raises:
        HpcTrainError: it is not what was written.
    """
    os.chmod(file, permissions(item))
    os.utime(file, ns=(item.mtime_ns,) * 2)
    if not _is(item, os.stat(file)):
        raise HpcTrainError(f"{item.path} is not what was written", "check this node's disk")


def _matches(path: str, item: Item) -> bool:
    """Whether what is there has the kind, permissions, size and time of an item."""
    try:
        about = os.lstat(path)
        if stat.S_ISLNK(item.mode):
            return os.readlink(path) == item.link
    except OSError:
        return False
    return _is(item, about)


def _is(item: Item, about: os.stat_result) -> bool:
    """Whether a file or folder has the kind, permissions, size and time of an item."""
    if about.st_mode != stat.S_IFMT(item.mode) | permissions(item):
        return False
    if not stat.S_ISREG(item.mode):
        return True
    same_time = about.st_mtime_ns // SECOND == item.mtime_ns // SECOND
    return same_time and about.st_size == item.size


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
