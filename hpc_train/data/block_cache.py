"""A cache of shards' blocks on a disk of a node or in its memory, shared by the node's processes.

A shard's copy is a sparse file of the shard's size, which has some of its blocks at their places.
There is no list of them. A process takes a block from the copy if it has its hash, which costs a
few microseconds where there is a hole. So neither a crash nor a power loss can leave a wrong cache,
and processes need not agree: all of them write the same bytes.

All processes that use a folder share a lock of it, which the system takes back even from those that
are killed. So the last one that leaves can remove the folder, and a folder without a lock is what a
killed job has left.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train import files
from hpc_train.errors import ConfigError
from hpc_train.host.memory import free_bytes

LEFT_FREE = 10  # a tenth of the disk is left free
UNSEEN_BYTES = 1 << 24  # most bytes that a process writes before it looks at the room again
OF_ROOM = 8  # these bytes are at most this part of the room, as other processes write, too
FULL_SECONDS = 60.0  # seconds until a process looks again at the room of a full disk
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

logger = logging.getLogger(__name__)


class BlockCache:
    """The cache of a data folder's blocks on this node.

    Copies of this object, such as in worker processes, do not hold the lock. They must not be used
    after the object that they were made of is closed.

    Args:
        folder: where the cache is made, on a disk or in the memory of this node. It is made if it
            is not there.
        digest: the manifest's digest.
        limit: the most bytes that all caches of this data in the folder have; 0 for no limit but
            the free space.

    Raises:
        ConfigError: the folder cannot be made or locked, or another user has made the cache.
    """

    def __init__(self, folder: Path, digest: str, limit: int = 0) -> None:
        # Nodes that share the folder by mistake have a cache each.
        about = f"hpc_train-cache-{os.getuid()}-{{}}@{socket.gethostname()}"
        self.path, self.limit = folder.absolute() / about.format(digest), limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = self._join()
            ours = re.compile(re.escape(about).replace(r"\{\}", "[0-9a-f]{32}"))
            for path in folder.absolute().iterdir():
                if path != self.path and ours.fullmatch(path.name):
                    _remove_left_over(path)
        except OSError as error:
            raise ConfigError(
                f"data.cache: {error.filename or self.path}: {error.strerror}",
                "give a folder on a disk or in the memory of each node",
            ) from None
        self._in_memory = _in_memory(self._folder)
        self._renew()

    def _renew(self) -> None:
        self._making = threading.Lock()
        self._left = 0  # bytes to write before the next look at the room
        self._look_at = 0.0  # when a full disk is looked at again
        self._told = self._stopped = False

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy."""
        return {key: getattr(self, key) for key in ("path", "limit", "_in_memory")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._renew()
        try:
            self._folder = os.open(self.path, OPEN_FOLDER)
        except OSError as error:
            self._folder = -1
            self.stop(error)

    def _join(self) -> int:
        """Open the cache's folder, make it if need be, and share its lock."""
        while True:
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            try:
                descriptor = os.open(self.path, OPEN_FOLDER)
            except FileNotFoundError:
                continue  # a process that left has removed it
            except NotADirectoryError:
                raise _foreign(self.path) from None
            try:
                about = os.fstat(descriptor)
                if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                    raise _foreign(self.path)
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits while a process removes it
                if _is_at(descriptor, self.path):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def open(self, name: str, nbytes: int) -> int:
        """Open a shard's copy, or make one that is a single hole.

        Args:
            name: the shard's name.
            nbytes: the size of its file.

        Returns:
            A descriptor, which the caller closes; -1 if there can be no copy.
        """
        try:
            with self._making:
                while not self._stopped:
                    try:
                        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
                        descriptor = os.open(name, flags, dir_fd=self._folder)
                    except FileNotFoundError:
                        self._make(name, nbytes)
                        continue
                    if os.fstat(descriptor).st_size == nbytes:
                        return descriptor
                    # It was truncated. It must not grow again under those that have it open, as
                    # they have verified blocks which would then be holes.
                    os.close(descriptor)
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=self._folder)
        except OSError as error:
            self.stop(error)
        return -1

    def _make(self, name: str, nbytes: int) -> None:
        # Its own name, as copies of this object in other threads may make the same shard's copy.
        partial, folder = f".{name}.{secrets.token_hex(8)}", self._folder
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o600, dir_fd=folder)
        try:
            os.ftruncate(descriptor, nbytes)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):  # another process was first
            os.link(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.unlink(partial, dir_fd=folder)

    def keep(self, descriptor: int, memory: memoryview, offset: int) -> bool:
        """Write verified bytes at their place in a shard's copy. Several threads may.

        Returns:
            Whether they are there; they are not if there is no room.
        """
        if not self.has_room(len(memory)):
            return False
        try:
            if os.fstat(descriptor).st_size < offset + len(memory):
                raise OSError(errno.EIO, "a shard's copy was truncated")
            files.write_at(descriptor, memory, offset)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.stop(error)
            else:
                self._fill_up()
            return False
        self._left -= len(memory)
        return True

    def has_room(self, nbytes: int) -> bool:
        """Whether some bytes may be written to it."""
        if self._stopped:
            return False
        if self._left < nbytes and time.monotonic() >= self._look_at:
            room = self._room()
            self._left = max(min(UNSEEN_BYTES, room // OF_ROOM), nbytes if nbytes <= room else 0)
            if self._left < nbytes:
                self._fill_up()
        return self._left >= nbytes

    def _room(self) -> int:
        """Bytes that all processes together may still write to it."""
        try:
            with os.scandir(self._folder) as entries:
                used = sum(entry.stat(follow_symlinks=False).st_blocks for entry in entries) << 9
            disk = os.fstatvfs(self._folder)
        except OSError:  # a file was just removed
            return 0
        room = (disk.f_bavail - disk.f_blocks // LEFT_FREE) * disk.f_frsize
        if self.limit:
            room = min(room, self.limit - used)
        if self._in_memory:
            room = min(room, free_bytes() - used)
        return max(0, room)

    def _fill_up(self) -> None:
        self._left, self._look_at = 0, time.monotonic() + FULL_SECONDS
        if not self._told:
            self._told = True
            logger.info(
                "the cache %s has no more room: other blocks are read from the data folder",
                self.path,
            )

    def stop(self, error: OSError) -> None:
        """Make and write no more copies, as the file system has failed."""
        if not self._stopped:
            self._stopped = True
            logger.warning(
                "the cache %s fails (%s): this process goes on without it",
                self.path,
                error.strerror,
            )

    def close(self) -> None:
        """Leave the cache. The last process on the node that leaves it removes it.

        Copies that are open can still be read.
        """
        with self._making:
            self._stopped = True
            folder, self._folder = self._folder, -1
        if folder >= 0:
            _remove_unused(folder, self.path)
            os.close(folder)


def _foreign(path: Path) -> ConfigError:
    return ConfigError(
        f"data.cache: {path} is not a folder of yours alone",
        "remove it, or give another folder",
    )


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open folder is the one that a path leads to."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove_left_over(path: Path) -> None:
    """Remove the cache of a job that was killed."""
    with suppress(OSError):  # another process is removing it
        descriptor = os.open(path, OPEN_FOLDER)
        try:
            _remove_unused(descriptor, path)
        finally:
            os.close(descriptor)


def _remove_unused(descriptor: int, path: Path) -> None:
    """Remove a folder unless another process has its lock. Gives this process's lock back."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if _is_at(descriptor, path):
        shutil.rmtree(path, ignore_errors=True)


def _in_memory(descriptor: int) -> bool:
    """Whether the file system of a folder is in memory, and files in it take memory from jobs."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0] in ("tmpfs", "ramfs")
    return False
