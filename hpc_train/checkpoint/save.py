"""All ranks write one checkpoint, so that it exists complete or not at all.

The ranks of a replica hold the whole state together, and each replica holds it. Each rank writes a
run of extents, which the ranks of its replica bring together. Another rank reads each extent back
and compares it with the hash of what was in memory, because the MPI-IO of some libraries reports
success on a full disk. Then rank 0 writes the header and its length, and renames the file. Each
phase ends in an agreement: an error of one rank is raised on all, and older checkpoints stay.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from hpc_train import files
from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.background import Phases, Snapshot, agree, enough_memory
from hpc_train.checkpoint.catalogue import find_checkpoints, unfinished_in
from hpc_train.checkpoint.claim import Claim
from hpc_train.checkpoint.engines import (
    PosixWriter,
    WriteEngine,
    Writer,
    create_striped,
    open_writer,
)
from hpc_train.checkpoint.exchange import Exchange, Scratch
from hpc_train.checkpoint.fileformat import HASH_BYTES, FileMap, hash_in
from hpc_train.checkpoint.parts import Bytes, Parts
from hpc_train.checkpoint.reading import read_extent
from hpc_train.checkpoint.routes import Plans, owned
from hpc_train.errors import CheckpointError, CheckpointUnreadable
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

T = TypeVar("T")
Extents = Iterable[tuple[int, Bytes] | None]


def saving(
    path: Path,
    parts: Parts,
    state: bytes,
    plans: Plans,
    *,
    engine: WriteEngine = "posix",
    verify: bool = True,
    snapshot: Snapshot | None = None,
    claim: Claim | None = None,
) -> Phases[float]:
    """Write a checkpoint, in phases. Collective.

    Args:
        path: the file to make. A file that exists is replaced when the new one is complete.
        parts: this rank's parts of tensors.
        state: all values that are not tensors, as JSON, the same on all ranks.
        plans: the plans of the ranks that write, which may be those of earlier saves.
        engine: how ranks write.
        verify: whether all extents are read back and compared.
        snapshot: keeps this rank's extents while the tensors change. Without one, the tensors must
            not change until the end.
        claim: of the directory, if the job holds one. Rank 0 checks it before it makes the file and
            before it completes it. Its token is a part of the name of the incomplete file.

    Returns:
        Seconds that the slowest rank took to write and sync.

    Raises:
        CheckpointError: the file could not be written, or the ranks of a replica do not own all of
            a tensor together. Nothing is left of the file.
        ClaimError: another job has the directory.
        UserError: the ranks do not have the same tensors or state.
    """
    group, replica = plans.group, plans.replica
    plan = plans.of(parts.held, state)
    layout, size = plan.layout, group.size
    token = f".{claim.token}" if claim is not None else ""
    check = claim.check if claim is not None else lambda: None
    exchange = Exchange(parts, plan.routes, layout, replica, state)
    partial_path = path.with_name(f".{path.name}{token}.partial")
    explained = partial(_explained, path)
    room, mine = Scratch(), [layout.size(number) for number in plan.runs[replica.rank]]
    # Before anything is sent, because a rank that runs out of memory later leaves others waiting.
    with agreed(group), enough_memory("extents", background=snapshot is not None):
        exchange.reserve()
        if snapshot is None:
            room(max(mine, default=0))
        else:
            snapshot.reserve(sum(mine))
    with ExitStack() as cleared:
        with agreed(group), _explaining(path):
            if group.rank == 0:
                check()
                for left in unfinished_in(path.parent) if token else []:
                    if left.name.endswith(f"{token}.partial"):  # a failed save could not remove it
                        _give_up(left)
                # From here on rank 0 removes the incomplete file if any phase fails on any rank.
                cleared.push(lambda failed, *_: _give_up(partial_path) if failed else None)
                _reserve(partial_path, layout.file_bytes)
        if snapshot is None:
            content: Extents = exchange.bring(plan.runs, plan.rounds, room, own=True)
        else:
            content = snapshot.of(exchange, plan.runs, plan.rounds)
        open_here = partial(open_writer, engine, partial_path, group)
        opened: Writer | None = None
        # Collective calls need a file that all ranks open together, also those that write nothing.
        if engine == "mpiio_collective" and group.comm is not None:
            opened = yield from agree(group, explained(open_here))
        hashes, seconds = yield from agree(
            group, explained(partial(_write, content, layout, open_here, opened))
        )
        if verify:  # rank r reads back what rank r + shift has written
            other = (group.rank + plan.shift) % size
            run = owned(layout.extents, other, size)
            expected = _hashes_of(other, (group.rank - plan.shift) % size, hashes, len(run), group)
            yield from agree(
                group, explained(partial(_read_back, partial_path, layout, expected, other, run))
            )
        table = _table(hashes, layout, group)
        commit = partial(_commit, partial_path, path, layout, table, group, check)
        yield from agree(group, explained(commit))
    return group.largest(round(seconds * 1e6)) / 1e6


def _hashes_of(other: int, reader: int, mine: bytes, count: int, group: Group) -> bytes:
    """The hashes of the extents that rank `other` has written. Collective.

    Args:
        other: the rank whose extents this rank reads back.
        reader: the rank that reads this rank's extents back.
        mine: the hashes of this rank's extents.
        count: the number of extents of rank `other`.
        group: the ranks that write.
    """
    if group.comm is None:
        return mine
    theirs = bytearray(count * HASH_BYTES)
    with group.waiting(f"the hashes of rank {other}"):
        group.comm.Sendrecv(mine, reader, recvbuf=theirs, source=other)
    return bytes(theirs)


def _table(mine: bytes, layout: FileMap, group: Group) -> bytes:
    """The hashes of all extents, on rank 0; empty on other ranks. Collective."""
    if group.comm is None:
        return mine
    from mpi4py import MPI  # a group with a communicator has MPI

    table, into = bytearray(), None
    if group.rank == 0:
        table = bytearray(layout.extents * HASH_BYTES)
        runs = (owned(layout.extents, rank, group.size) for rank in range(group.size))
        into = [table, [HASH_BYTES * len(run) for run in runs], None, MPI.BYTE]
    with group.waiting("the hashes of a checkpoint"):
        group.comm.Gatherv(mine, into)
    return bytes(table)


def _give_up(partial: Path) -> None:
    """Remove an incomplete file."""
    with suppress(OSError):  # the error that is raised at the moment says more
        files.remove(partial)


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = (
            "free space or quota" if full else "see that you may write there, and the disk works"
        )
        older: list[Path] = []
        with suppress(OSError, CheckpointUnreadable):  # the folder may be what fails
            older = [one for one in find_checkpoints(path.parent, "auto") if one != path]
        raise CheckpointError(
            f"checkpoint {path} could not be written ({error.strerror or error})",
            f"{remedy}; older checkpoints are untouched" if older else remedy,
        ) from error


def _explained(path: Path, work: Callable[[], T]) -> Callable[[], T]:
    def explained() -> T:
        with _explaining(path):
            return work()

    return explained


def _reserve(partial: Path, size: int) -> None:
    """Make the file at its full size, so that a lack of space shows before anything is written."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    files.remove(partial)  # a job that was killed may have left it
    made = create_striped(partial, size)
    flags = os.O_WRONLY | os.O_CLOEXEC | (0 if made else os.O_CREAT | os.O_EXCL)
    descriptor = files.call("create", os.open, partial, flags, 0o666)
    try:
        files.call("reserve", files.reserve, descriptor, 0, size)
    finally:
        files.call("close", os.close, descriptor)


def _write(
    content: Extents, layout: FileMap, open_here: Callable[[], Writer], together: Writer | None
) -> tuple[bytes, float]:
    """Write this rank's extents; returns their hashes and the seconds it took.

    After an error it still fetches extents, as the other ranks of the replica do, and still makes
    the collective calls that other ranks wait in.

    Args:
        content: this rank's extents with their numbers, one for each round, or None.
        layout: of the file.
        open_here: opens the file. It is called if this rank has something to write.
        together: the file that all ranks have opened for collective calls, if they have.
    """
    begin = time.monotonic()
    hashes: list[bytes] = []
    failures: list[Exception] = []
    writer = together
    for fetched in content:
        with _noted(failures):
            if fetched is not None and not failures:
                number, extent = fetched
                writer = writer or open_here()
                hashes.append(fileformat.hash_of(extent))
                writer.write_at(layout.data_start + layout.extent(number)[0], extent.data)
            elif together is not None:
                together.write_at(layout.data_start, b"")
    if writer is not None:
        with _noted(failures):
            if together is not None or not failures:
                writer.sync()
        with _noted(failures):
            writer.close()
    if failures:
        raise failures[0]
    return b"".join(hashes), time.monotonic() - begin


@contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # `_write` raises the first one at its end
        failures.append(error)


def _read_back(
    partial: Path, layout: FileMap, hashes: bytes, other: int, numbers: Iterable[int]
) -> None:
    """Compare the extents that another rank wrote with their hashes.

    Args:
        partial: the incomplete file.
        layout: of the file.
        hashes: of these extents.
        other: the rank that wrote them.
        numbers: of these extents.
    """
    with files.opened(partial) as descriptor:
        for place, number in enumerate(numbers):
            if not read_extent(descriptor, layout, number, hash_in(hashes, place)):
                begin, _ = layout.extent(number)
                raise OSError(f"what rank {other} wrote from byte {begin} on is not on the disk")


def _commit(
    partial: Path,
    path: Path,
    layout: FileMap,
    table: bytes,
    group: Group,
    check: Callable[[], None],
) -> None:
    """On rank 0: write hashes and header, then the header's length, then give the file its name."""
    if group.rank > 0:
        return
    check()
    head = fileformat.header(layout, table)
    length = len(head).to_bytes(8, "little")
    writer = PosixWriter(partial)
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
    check()
    files.rename(partial, path)
