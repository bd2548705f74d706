"""The engines that write a file, through MPI-IO or POSIX calls: the bytes are the same."""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from hpc_train import files
from hpc_train.checkpoint.fileformat import EXTENT_BYTES, STRIPED_BYTES
from hpc_train.errors import ConfigError
from hpc_train.files import Buffer
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

WriteEngine = Literal["mpiio", "mpiio_collective", "posix"]
CheckpointEngine = Literal["auto", "mpiio", "mpiio_collective", "posix"]

TRIES = 2  # files that `auto` writes with each engine: the first one may find a cold disk

# Stripes by size of a shared file, in bytes: NERSC's recommendation for Lustre
# (docs.nersc.gov, "Lustre file striping"). Smaller files stay on one server.
STRIPES = ((100 * 10**9, 72), (10 * 10**9, 24), (STRIPED_BYTES, 8))

# Lustre reads and sets a file's stripes through an extended attribute. So no program is started,
# which a process that communicates through MPI must not do.
LUSTRE_ATTRIBUTE = "lustre.lov"
# lov_user_md_v1 of Lustre's lustre_user.h: magic number, pattern, the file's id (not to be set),
# bytes of a stripe, number of stripes, first server.
LUSTRE_LAYOUT = struct.Struct("=II16xIHH")
LUSTRE_MAGIC, LUSTRE_MAGIC_WITH_POOL = 0x0BD10BD0, 0x0BD30BD0
RAID0 = 1
ANY_SERVER = 0xFFFF


class Writer(Protocol):
    """An existing file, open for writing by one rank."""

    collective: bool
    """Whether all ranks must open the file and write equally often."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of the data at a byte offset.

        Raises:
            OSError: the system reports that it could not.
        """

    def sync(self) -> None:
        """Bring all written data to the disk."""

    def close(self) -> None:
        """Close the file."""


class PosixWriter:
    """Writes with pwrite(2)."""

    collective = False

    def __init__(self, path: Path) -> None:
        self._descriptor = files.call("open", os.open, path, os.O_WRONLY | os.O_CLOEXEC)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of the data."""
        files.write_at(self._descriptor, data, offset)
        files.begin_writing(self._descriptor, offset, len(data))

    def sync(self) -> None:
        """fsync(2)."""
        files.call("sync", os.fsync, self._descriptor)

    def close(self) -> None:
        """Close the file."""
        files.call("close", os.close, self._descriptor)


class MpiWriter:
    """Writes with MPI_File_write_at, each rank by itself, or with MPI_File_write_at_all.

    The writes are contiguous and disjoint. So data sieving, which would read and lock the bytes to
    be written, is disabled. Other ranks do not buffer independent calls either, so a rank that
    fails leaves no rank waiting. They buffer collective calls, which each rank must therefore make
    also after an error.

    Args:
        path: an existing file.
        group: the ranks that write with collective calls; without one, this rank writes by itself.
    """

    def __init__(self, path: Path, group: Group | None = None) -> None:
        from mpi4py import MPI

        self._MPI = MPI
        self.collective = group is not None
        buffered = "enable" if self.collective else "disable"
        hints = {"romio_ds_write": "disable", "romio_cb_write": buffered}
        if self.collective:
            hints["cb_buffer_size"] = str(EXTENT_BYTES)
        info = MPI.Info.Create(hints)
        comm = group.comm if group is not None and group.comm is not None else MPI.COMM_SELF

        def opened() -> Any:
            file = MPI.File.Open(comm, str(path), MPI.MODE_WRONLY, info)
            kept = file.Get_info()
            if kept.Get("romio_ds_write") == "automatic":  # Open MPI 5 has forgotten the hints
                file.Set_info(info)
            kept.Free()
            return file

        self._file: Any = self._checked("open", opened)
        info.Free()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write the data and compare the count that MPI reports."""
        status = self._MPI.Status()
        write = self._file.Write_at_all if self.collective else self._file.Write_at
        self._checked("write", write, offset, [data, self._MPI.BYTE], status)
        count = status.Get_count(self._MPI.BYTE)
        if count != len(data):
            raise OSError(f"MPI-IO wrote {count} of {len(data)} bytes")
        files.begin_writing(self._descriptor, offset, len(data))

    def sync(self) -> None:
        """Call MPI_File_sync, and fsync(2), which not every MPI-IO component calls."""
        self._checked("sync", self._file.Sync)
        files.call("sync", os.fsync, self._descriptor)

    def close(self) -> None:
        """Close the file."""
        try:
            self._checked("close", self._file.Close)  # first, because other ranks may wait in it
        finally:
            os.close(self._descriptor)

    def _checked(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return files.call(f"mpi_{name}", function, *arguments)
        except self._MPI.Exception as error:
            raise OSError(f"MPI-IO: {error.Get_error_string()}") from None


def open_writer(way: WriteEngine, path: Path, group: Group) -> Writer:
    """Open an existing file for writing. Collective with the engine mpiio_collective."""
    if way == "posix" or group.comm is None:
        return PosixWriter(path)
    return MpiWriter(path, group if way == "mpiio_collective" else None)


class EngineChoice:
    """Chooses how each checkpoint of a job is written.

    The engine auto writes the first files by POSIX calls and through MPI-IO in turn. Then it stays
    with the faster one.

    Args:
        engine: as configured.
        group: the ranks.
        background: whether a thread will write, which makes no MPI calls.

    Raises:
        ConfigError: the engine writes through MPI-IO, and the process runs without MPI or saves in
            the background.
    """

    def __init__(self, engine: CheckpointEngine, group: Group, *, background: bool = False) -> None:
        self._seconds: dict[WriteEngine, list[float]] = defaultdict(list)
        if engine == "auto":
            alone = group.comm is None or background
            self._engines: tuple[WriteEngine, ...] = ("posix",) if alone else ("posix", "mpiio")
            return
        self._engines = (engine,)
        if engine == "posix":
            return
        if group.comm is None:
            raise ConfigError(
                f"checkpoint.engine is {engine}, but this process runs without MPI",
                "start several ranks, or use engine auto",
            )
        if background:
            raise ConfigError(
                f"checkpoint.engine is {engine}, but the thread of checkpoint.background makes no "
                "MPI calls",
                "use engine auto or posix, or background false",
            )

    def next(self) -> WriteEngine:
        """The engine that writes the next file. It is the same on all ranks."""
        untried = [way for way in self._engines if len(self._seconds[way]) < TRIES]
        if len(self._engines) > 1 and untried:
            return min(untried, key=lambda way: len(self._seconds[way]))
        return min(self._engines, key=lambda way: min(self._seconds[way], default=0.0))

    def give_up(self, way: WriteEngine) -> bool:
        """Fall back to POSIX calls after an error; returns whether the engine allows it."""
        other = len(self._engines) > 1 and way != "posix"
        if other:
            self._engines = ("posix",)
        return other

    def note(self, way: WriteEngine, seconds: float) -> None:
        """Note how long writing took. The number is the same on all ranks."""
        self._seconds[way].append(seconds)


def create_striped(path: Path, nbytes: int) -> bool:
    """On Lustre, make an empty file with stripes as long as an extent; returns whether it was made.

    Stripes can only be set while a file has no content and was never opened. They are read back
    afterwards, because there may be fewer servers than asked for.

    Args:
        path: the file to make.
        nbytes: the size that it will have.
    """
    if not _is_lustre(path.parent):
        return False
    count = next((stripes for size, stripes in STRIPES if nbytes > size), 1)
    try:
        files.call("create", os.mknod, path, stat.S_IFREG | 0o666)
        os.setxattr(
            path,
            LUSTRE_ATTRIBUTE,
            LUSTRE_LAYOUT.pack(LUSTRE_MAGIC, RAID0, EXTENT_BYTES, count, ANY_SERVER),
        )
    except OSError:
        with suppress(OSError):  # the caller makes the file without stripes, and meets the error
            files.remove(path)
        return False
    found = _stripes(path)
    if found != count:
        logger.info("%s has %s stripes, %d were asked for", path, found, count)
    return True


def _is_lustre(folder: Path) -> bool:
    try:
        os.getxattr(folder, LUSTRE_ATTRIBUTE)
    except OSError as error:
        return error.errno == errno.ENODATA  # a folder of Lustre without stripes of its own
    return True


def _stripes(path: Path) -> int | None:
    """The number of a file's stripes; None if Lustre does not tell."""
    with suppress(OSError, struct.error):
        magic, _, _, count, _ = LUSTRE_LAYOUT.unpack_from(os.getxattr(path, LUSTRE_ATTRIBUTE))
        return int(count) if magic in (LUSTRE_MAGIC, LUSTRE_MAGIC_WITH_POOL) else None
    return None
