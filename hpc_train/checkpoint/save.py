"""Write one checkpoint with all ranks, so that it exists complete or not at all.

Every rank holds the whole state. The ranks write a run of extents each, every extent is read back
by another rank and compared with the hash of what was in memory (MPI-IO of some libraries reports
success on a full disk), then rank 0 writes the header, its length, and renames the file. Each phase
ends in an agreement: what fails on one rank is raised on all, and older checkpoints stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from hpc_train import files
from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.engines import Engine, open_writer
from hpc_train.checkpoint.fileformat import HASH_BYTES, STATE, Layout
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group


def save(
    path: Path, tensors: Mapping[str, Tensor], state: bytes, group: Group, engine: Engine = "auto"
) -> None:
    """Write a checkpoint. Collective.

    Args:
        path: the file to make; one that exists is replaced when the new one is complete.
        tensors: by name, contiguous, the same on all ranks.
        state: what is no tensor, as JSON, the same on all ranks.
        group: the ranks that write.
        engine: how they write.

    Raises:
        CheckpointError: it could not be written; nothing is left of it.
        UserError: the ranks do not have the same tensors or state.
    """
    with agreed(group):
        layout = fileformat.plan(tensors, state)
    same(group, "the plan of the checkpoint", f"{layout}{state!r}", "build the same model on all")
    content = {**tensors, STATE: torch.frombuffer(bytearray(state), dtype=torch.uint8)}
    partial = path.with_name(f".{path.name}.partial")
    try:
        with agreed(group), _explained(path):
            if group.rank == 0:
                _reserve(partial, layout.file_bytes)
        with agreed(group), _explained(path):
            mine = _write_extents(partial, content, layout, group, engine)
        table = b"".join(_gathered(group, mine))
        with agreed(group), _explained(path):
            _read_back(partial, layout, table, group)
        with agreed(group), _explained(path):
            if group.rank == 0:
                _commit(partial, path, layout, table, group, engine)
    except HpcTrainError:
        if group.rank == 0:
            with suppress(OSError):  # the error that is being raised says more
                partial.unlink(missing_ok=True)
        raise


def owned(extents: int, rank: int, size: int) -> range:
    """The run of extents that a rank writes."""
    return range(rank * extents // size, (rank + 1) * extents // size)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path} could not be written ({error.strerror or error})",
            "free space or quota; older checkpoints are untouched",
        ) from error


def _reserve(partial: Path, size: int) -> None:
    """Make the file at its full size, so that a lack of space shows before anything is written."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)  # left by a job that was killed
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _write_extents(
    partial: Path, content: Mapping[str, Tensor], layout: Layout, group: Group, engine: Engine
) -> bytes:
    """Write this rank's extents; returns their hashes."""
    hashes = []
    writer = open_writer(engine, partial, group)
    try:
        for number in owned(layout.extents, group.rank, group.size):
            begin, end = layout.extent(number)
            data = fileformat.read_bytes(content, layout, begin, end)
            hashes.append(fileformat.hash_of(data))
            writer.write_at(layout.data_start + begin, data)
        writer.sync()
    finally:
        writer.close()
    return b"".join(hashes)


def _gathered(group: Group, value: bytes) -> list[bytes]:
    return group.comm.allgather(value) if group.comm else [value]


def _read_back(partial: Path, layout: Layout, table: bytes, group: Group) -> None:
    """Compare what another rank, on another node where there is one, wrote."""
    other = (group.rank + max(1, group.size // 2)) % group.size
    with partial.open("rb", buffering=0) as file:
        for number in owned(layout.extents, other, group.size):
            begin, end = layout.extent(number)
            data = os.pread(file.fileno(), end - begin, layout.data_start + begin)
            if fileformat.hash_of(data) != table[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
                raise OSError(f"what rank {other} wrote from byte {begin} on is not on the disk")


def _commit(
    partial: Path, path: Path, layout: Layout, table: bytes, group: Group, engine: Engine
) -> None:
    """Write hashes and header, then the header's length, then give the file its name."""
    head = fileformat.header(layout, table)
    length = len(head).to_bytes(8, "little")
    writer = open_writer(engine, partial, group)
    try:
        writer.write_at(layout.data_start + layout.content_bytes, table)
        writer.write_at(8, head)
        writer.sync()
        writer.write_at(0, length)
        writer.sync()
    finally:
        writer.close()
    with partial.open("rb") as file:
        written = file.read(layout.data_start)
        file.seek(layout.data_start + layout.content_bytes)
        if written != length + head or file.read() != table:
            raise OSError("header or hashes are not on the disk as they were written")
    files.rename(partial, path)
