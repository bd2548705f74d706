"""The ways to write a file: through MPI-IO or through POSIX, byte for byte the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Protocol

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
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write_at(self, offset: int, data: bytes | bytearray) -> None:
        """Write all of the data, however many calls that takes."""
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[count:], offset + count

    def sync(self) -> None:
        """fsync(2)."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


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
            lambda: MPI.File.Open(MPI.COMM_SELF, str(path), MPI.MODE_WRONLY)
        )

    def write_at(self, offset: int, data: bytes | bytearray) -> None:
        """Write the data and compare the count that MPI reports."""
        status = self._MPI.Status()
        self._checked(lambda: self._file.Write_at(offset, [data, self._MPI.BYTE], status))
        count = status.Get_count(self._MPI.BYTE)
        if count != len(data):
            raise OSError(f"MPI-IO wrote {count} of {len(data)} bytes")

    def sync(self) -> None:
        """MPI_File_sync, and fsync(2), which not every MPI-IO component calls."""
        self._checked(self._file.Sync)
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the file."""
        self._checked(self._file.Close)

    def _checked(self, call: Any) -> Any:
        try:
            return call()
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
