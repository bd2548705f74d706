"""Write one checkpoint with all ranks, so that it exists complete or not at all.

The ranks of a replica hold the whole state together, and every replica holds it. The ranks write a
run of extents each, put together by their replica; every extent is read back by another rank and
compared with the hash of what was in memory (MPI-IO of some libraries reports success on a full
disk), then rank 0 writes the header, its length, and renames the file. Each phase ends in an
agreement: what fails on one rank is raised on all, and older checkpoints stay.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from hpc_train import files
from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.engines import Engine, Writer, open_writer
from hpc_train.checkpoint.fileformat import HASH_BYTES, STATE, Form, Held, Layout
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group

T = TypeVar("T")


def save(
    path: Path,
    held: Mapping[str, Held],
    state: bytes,
    group: Group,
    engine: Engine = "auto",
    replica: Group | None = None,
) -> None:
    """Write a checkpoint. Collective.

    Args:
        path: the file to make; one that exists is replaced when the new one is complete.
        held: this rank's parts of tensors, by the tensors' names.
        state: what is no tensor, as JSON, the same on all ranks.
        group: the ranks that write.
        engine: how they write.
        replica: the ranks that hold the state together; by default each rank holds all of it.

    Raises:
        CheckpointError: it could not be written, or the ranks of a replica do not own all of a
            tensor together; nothing is left of it.
        UserError: the ranks do not have the same tensors or state.
    """
    replica = replica or Group()
    forms = together(replica, {name: part.form for name, part in held.items()})
    mine = {name: part.owned * part.tensor.numel() for name, part in held.items()}
    elements = _gathered(replica, mine)
    with agreed(group):
        _check_owned(forms, elements)
        layout = fileformat.plan(forms, state)
    same(group, "the plan of the checkpoint", f"{layout}{state!r}", "build the same model on all")
    content = {**held, STATE: _state_part(state, replica)}
    partial = path.with_name(f".{path.name}.partial")
    try:
        with agreed(group), _explained(path):
            if group.rank == 0:
                _reserve(partial, layout.file_bytes)
        hashes = _write_extents(partial, path, content, layout, group, replica, engine)
        table = b"".join(_gathered(group, hashes))
        with agreed(group), _explained(path):
            _read_back(partial, layout, table, group)
        with agreed(group), _explained(path):
            if group.rank == 0:
                _commit(partial, path, layout, table, group, engine)
    except HpcTrainError:
        if group.rank == 0:
            with suppress(OSError):  # the error that is being raised says more
                files.remove(partial)
        raise


def together(replica: Group, mine: Mapping[str, T]) -> dict[str, T]:
    """What the ranks of a replica have by name, all together. Collective over the replica."""
    return {name: value for part in _gathered(replica, mine) for name, value in part.items()}


def _check_owned(forms: Mapping[str, Form], elements: Iterable[Mapping[str, int]]) -> None:
    """Check that the ranks of a replica own as many elements as there are: no zeros in between."""
    owned: Counter[str] = Counter()
    for of_rank in elements:
        owned.update(of_rank)
    for name, (_, shape) in forms.items():
        if owned[name] != math.prod(shape):
            raise CheckpointError(
                f"the ranks of a replica own {owned[name]} elements of {name} {list(shape)}",
                "let each part be owned by one of them",
            )


def _state_part(state: bytes, replica: Group) -> Held:
    held = Held.whole(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return replace(held, owned=replica.rank == 0)


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
    files.remove(partial)  # left by a job that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = files.call("create", os.open, partial, flags, 0o666)
    try:
        files.call("reserve", os.posix_fallocate, descriptor, 0, size)
    finally:
        files.call("close", os.close, descriptor)


def _write_extents(
    partial: Path,
    path: Path,
    content: Mapping[str, Held],
    layout: Layout,
    group: Group,
    replica: Group,
    engine: Engine,
) -> bytes:
    """Write this rank's extents; returns their hashes. Collective."""
    hashes: list[bytes] = []
    writer: Writer | None = None
    failure: Exception | None = None
    for number, data in _my_extents(content, layout, group, replica):
        if failure is None:
            try:  # no agreement here: the other ranks of the replica go on to the next extent
                writer = writer or open_writer(engine, partial, group)
                hashes.append(fileformat.hash_of(data))
                writer.write_at(layout.data_start + layout.extent(number)[0], data)
            except Exception as error:  # noqa: BLE001  # raised below, on all ranks
                failure = error
    with agreed(group), _explained(path):
        try:
            if failure is not None:
                raise failure
            if writer is not None:
                writer.sync()
        finally:
            if writer is not None:
                writer.close()
    return b"".join(hashes)


def _my_extents(
    content: Mapping[str, Held], layout: Layout, group: Group, replica: Group
) -> Iterator[tuple[int, bytearray]]:
    """The extents that this rank writes, put together by its replica. Collective over it.

    Parts of different ranks never overlap, so their union is a bitwise or with zeros in between.
    """
    for root, writer in enumerate(_gathered(replica, group.rank)):
        for number in owned(layout.extents, writer, group.size):
            data = fileformat.read_bytes(content, layout, *layout.extent(number))
            if replica.comm is not None:
                data = _united(data, replica, root)
            if root == replica.rank:
                yield number, data


def _united(data: bytearray, replica: Group, root: int) -> bytearray:
    from mpi4py import MPI  # a group with a communicator has MPI

    assert replica.comm is not None
    whole = bytearray(len(data) if replica.rank == root else 0)
    with replica.waiting("an extent of a checkpoint"):
        replica.comm.Reduce([data, MPI.BYTE], [whole, MPI.BYTE], op=MPI.BOR, root=root)
    return whole


def _gathered(group: Group, value: T) -> list[T]:
    if group.comm is None:
        return [value]
    with group.waiting("what all ranks hold"):
        return group.comm.allgather(value)


def _read_back(partial: Path, layout: Layout, table: bytes, group: Group) -> None:
    """Compare what another rank, on another node where there is one, wrote."""
    other = (group.rank + max(1, group.size // 2)) % group.size
    with files.opened(partial) as descriptor:
        for number in owned(layout.extents, other, group.size):
            begin, end = layout.extent(number)
            data = files.read_at(descriptor, end - begin, layout.data_start + begin)
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
    with files.opened(partial) as descriptor:
        written = files.read_at(descriptor, layout.data_start, 0)
        hashes = files.read_at(descriptor, len(table), layout.data_start + layout.content_bytes)
        if written != length + head or hashes != table:
            raise OSError("header or hashes are not on the disk as they were written")
    files.rename(partial, path)
