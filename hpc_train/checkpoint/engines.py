"""The ways to write a file: through MPI-IO or through POSIX, byte for byte the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from hpc_train import files
from hpc_train.errors import ConfigError
from hpc_train.mpi.group import Group

Engine = Literal["auto", "mpiio", "posix"]


class Writer(Protocol):
    """An existing file, open for writing by one rank."""

    def write_at(self, offset: int, data: bytes | bytearray) -> None:
        """Write all of the data at a byte offset; OSError if the system says that it could not."""

    def sync(self) -> None:
        """Bring what was written to the disk."""

    def close(self) -> None:
        """Close the file."""


class PosixWriter:
    """Writes with pwrite(2)."""

    def __init__(self, path: Path) -> None:
        self._descriptor = files.call("open", os.open, path, os.O_WRONLY | os.O_CLOEXEC)

    def write_at(self, offset: int, data: bytes | bytearray) -> None:
        """Write all of the data."""
        files.write_at(self._descriptor, data, offset)

    def sync(self) -> None:
        """fsync(2)."""
        files.call("sync", os.fsync, self._descriptor)

    def close(self) -> None:
        """Close the file."""
        files.call("close", os.close, self._descriptor)


class MpiWriter:
    """Writes with MPI_File_write_at.

    Each rank opens the one file by itself: the writes are contiguous and disjoint, for which
    collective calls bring nothing, and a rank that fails then leaves nobody waiting in one.
    """

    def __init__(self, path: Path) -> None:
        from mpi4py import MPI

        self._MPI = MPI
        self._path = path
        self._file: Any = self._checked(
            "open", MPI.File.Open, MPI.COMM_SELF, str(path), MPI.MODE_WRONLY
        )

    def write_at(self, offset: int, data: bytes | bytearray) -> None:
        """Write the data and compare the count that MPI reports."""
        status = self._MPI.Status()
        self._checked("write", self._file.Write_at, offset, [data, self._MPI.BYTE], status)
        count = status.Get_count(self._MPI.BYTE)
        if count != len(data):
            raise OSError(f"MPI-IO wrote {count} of {len(data)} bytes")

    def sync(self) -> None:
        """MPI_File_sync, and fsync(2), which not every MPI-IO component calls."""
        self._checked("sync", self._file.Sync)
        files.sync(self._path)

    def close(self) -> None:
        """Close the file."""
        self._checked("close", self._file.Close)

    def _checked(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return files.call(f"mpi_{name}", function, *arguments)
        except self._MPI.Exception as error:
            raise OSError(f"MPI-IO: {error.Get_error_string()}") from None


def check_engine(engine: Engine, group: Group) -> None:
    """Check that the ranks can write in this way.

    Raises:
        ConfigError: engine mpiio in a process that runs without MPI.
    """
    if engine == "mpiio" and group.comm is None:
        raise ConfigError(
            "checkpoint.engine is mpiio, but this process runs without MPI",
            "start several ranks, or use engine auto",
        )


def open_writer(engine: Engine, path: Path, group: Group) -> Writer:
    """Open an existing file for writing; `auto` is MPI-IO under MPI, else POSIX."""
    if engine == "posix" or group.comm is None:
        return PosixWriter(path)
    return MpiWriter(path)
