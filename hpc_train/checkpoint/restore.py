"""Read a checkpoint: one rank reads and verifies an extent, and hands it to the ranks that hold it.

Each byte is read from the file system once, whatever the number of ranks. A rank that has read an
extent hands each rank of its replica the pieces that it holds. That rank passes them on to the
ranks of other replicas that hold the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.exchange import MESSAGES_AT_ONCE, Exchange, Scratch
from hpc_train.checkpoint.fileformat import (
    HASHES,
    STATE,
    Entry,
    FileMap,
    LocalTensor,
    hash_in,
    torch_dtypes,
)
from hpc_train.checkpoint.parts import Bytes, Parts, Specs, pieces_of, total
from hpc_train.checkpoint.reading import BROKEN, patiently, read_extent, read_header
from hpc_train.checkpoint.routes import NOBODY, Routes, extents_of
from hpc_train.errors import CheckpointError
from hpc_train.files import parsed_object
from hpc_train.mpi.agreement import agreed, from_first
from hpc_train.mpi.group import Group


@dataclass(frozen=True)
class CheckpointReader:
    """A complete checkpoint file with a sound header.

    Args:
        path: the file.
        layout: of the file.
        table: the hashes of the extents, one behind the other.
    """

    path: Path
    layout: FileMap
    table: bytes

    @classmethod
    def open(cls, path: Path) -> CheckpointReader:
        """Read and check header and hash table.

        Raises:
            CheckpointMismatch: another program wrote the file, or its format has another version.
            CheckpointUnreadable: the file is missing, or the file system cannot read it.
            CheckpointError: the file was never completed, or it is damaged.
        """
        return cls(path, *read_header(path))

    @property
    def entries(self) -> dict[str, Entry]:
        """The places of the tensors in the file, by name."""
        return {e.name: e for e in self.layout.entries if e.name not in (STATE, HASHES)}

    def read(self, number: int, into: Bytes) -> None:
        """Read one extent and verify it.

        Args:
            number: of the extent.
            into: memory of its size.

        Raises:
            CheckpointUnreadable: the file system cannot read it.
            CheckpointError: its bytes are not those that were saved.
        """
        expected = hash_in(self.table, number)
        sound = patiently(
            self.path,
            lambda file: read_extent(file, self.layout, number, expected, into.data),
        )
        if not sound:
            begin, end = self.layout.extent(number)
            raise CheckpointError(
                f"checkpoint {self.path}: data bytes {begin} to {end} are not what was saved",
                BROKEN,
            )

    def extent(self, number: int) -> Bytes:
        """The bytes of one extent, verified.

        Raises:
            CheckpointUnreadable, CheckpointError: as in `read`.
        """
        into = np.empty(self.layout.size(number), np.uint8)
        self.read(number, into)
        return into


class Tensors:
    """Reads the tensors of a checkpoint by name, one at a time, verified, in one process.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is damaged. Each access to a tensor may raise it, too.
        CheckpointUnreadable: the file system cannot read the file. Each access may raise it, too.
        CheckpointMismatch: another program wrote the file, or its format has another version.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, CheckpointReader.open(path)
        self.entries = {entry.name: entry for entry in self.reader.layout.entries}
        self.names = list(self.reader.entries)
        # Small tensors share an extent, which is read only for the first one of them.
        self._extent = functools.lru_cache(maxsize=1)(self.reader.extent)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry, layout = self.entries[name], self.reader.layout
        tensor = torch.empty(entry.shape, dtype=torch_dtypes()[entry.dtype])
        held = LocalTensor.whole(tensor)
        parts = Parts({name: held})
        for number in range(
            entry.begin // fileformat.EXTENT_BYTES, -(-entry.end // fileformat.EXTENT_BYTES)
        ):
            pieces = pieces_of({name: held.spec}, layout, *layout.extent(number))
            parts.scatter(self._extent(number), pieces)
        return tensor

    def state(self) -> dict[str, Any]:
        """All values in the file that are not tensors."""
        return _tree(self.path, self[STATE])


def open_together(path: Path, group: Group) -> CheckpointReader:
    """Open a checkpoint on rank 0 and hand its header to all ranks. Collective.

    Raises:
        CheckpointError, CheckpointUnreadable, CheckpointMismatch: as in `CheckpointReader.open`.
    """
    return from_first(group, lambda: CheckpointReader.open(path))


def load_tensors(
    reader: CheckpointReader,
    held: Mapping[str, LocalTensor],
    group: Group,
    replica: Group | None = None,
    alike: Group | None = None,
) -> None:
    """Fill tensors from a checkpoint, reading only the extents that they lie in. Collective.

    Args:
        reader: from `open_together`.
        held: this rank's parts, contiguous, by their tensors' names. Types and whole shapes are
            those that the checkpoint has.
        group: the ranks that receive.
        replica: the ranks that hold all tensors together. By default that is all ranks, or this
            rank alone if `alike` is given.
        alike: the ranks of all replicas that hold the same as this rank; by default this rank
            alone. A replica and such a group have one rank in common.

    Raises:
        CheckpointUnreadable: a rank cannot read an extent. Some tensors may have been filled.
        CheckpointError: an extent is damaged. Some tensors may have been filled.
        ValueError: the sizes of the groups do not fit together.
    """
    replica = replica or (group if alike is None else Group())
    alike = alike or Group()
    if alike.size * replica.size != group.size:
        raise ValueError(f"{alike.size} replicas of {replica.size} ranks are not {group.size}")
    layout, me = reader.layout, replica.rank
    specs = {name: part.spec for name, part in held.items()}
    wanted = _wanted(specs, layout, replica)
    keepers = np.full(layout.extents, NOBODY, np.int64)
    for rank in range(replica.size):  # the ranks of this replica read their extents in turn
        keepers[wanted[alike.rank * replica.size + rank :: group.size]] = rank
    routes = Routes(specs, layout, keepers, replica, remember=4 * MESSAGES_AT_ONCE)
    exchange = Exchange(Parts(held), routes, layout, replica)
    mine = wanted[alike.rank * replica.size + me :: group.size]
    rooms = Scratch(), Scratch()

    def read(turn: int) -> Bytes | None:
        if turn >= len(mine):
            return None
        extent = _memory(exchange, mine[turn])
        if extent is None:
            extent = rooms[turn % 2](layout.size(mine[turn]))
        reader.read(mine[turn], extent)
        return extent

    # The thread reads the next extent while the ranks hand round those that they have read.
    with ThreadPoolExecutor(1, "checkpoint") as thread:
        ahead = thread.submit(read, 0)
        for turn, first in enumerate(range(0, len(wanted), group.size)):
            with agreed(group):
                extent = ahead.result()
            ahead = thread.submit(read, turn + 1)
            together = wanted[first : first + group.size]  # one extent for each rank
            for copy in range(alike.size):
                has = together[copy * replica.size : (copy + 1) * replica.size]
                for start in range(0, len(has), MESSAGES_AT_ONCE):
                    some = {
                        start + i: n for i, n in enumerate(has[start : start + MESSAGES_AT_ONCE])
                    }
                    _hand_round(exchange, some, extent, alike, copy)


def _wanted(specs: Specs, layout: FileMap, replica: Group) -> list[int]:
    """The extents that any rank of a replica needs, ascending. Collective over the replica."""
    needed = np.zeros(layout.extents, np.uint8)
    for entry in layout.entries:
        if (spec := specs.get(entry.name)) is not None:
            numbers = extents_of(entry, spec)
            needed[numbers.start : numbers.stop] = 1
    if replica.comm is not None:
        from mpi4py import MPI  # a group with a communicator has MPI

        with replica.waiting("what ranks want of a checkpoint"):
            replica.comm.Allreduce(MPI.IN_PLACE, needed, op=MPI.MAX)
    return np.flatnonzero(needed).tolist()


def _memory(exchange: Exchange, number: int) -> Bytes | None:
    """The memory of a tensor that an extent can be read into directly, if there is one.

    All bytes of the extent must belong to that tensor, and the rank must be alone in its replica.
    """
    if exchange.replica.comm is not None:
        return None
    return exchange.parts.memory(exchange.mine(number), exchange.layout.size(number))


def _hand_round(
    exchange: Exchange, read: Mapping[int, int], extent: Bytes | None, alike: Group, root: int
) -> None:
    """Bring the extents that one replica has read to all ranks that hold some of them. Collective.

    Args:
        exchange: of this rank's replica.
        read: the number of the extent that a rank of the replica has read, by rank.
        extent: the bytes of the extent that this rank has read.
        alike: the ranks of all replicas that hold the same as this rank.
        root: the one of them whose replica has read these extents.
    """
    pieces = [piece for number in read.values() for piece in exchange.mine(number)]
    memory = _memory(exchange, *read.values()) if exchange.replica.comm is None else None
    if memory is not None:
        packed = memory  # the extent was read into it, or will be received into it
    elif alike.rank == root:
        packed = exchange.hand_out(read, extent)
    else:
        packed = np.empty(total(pieces), np.uint8)
    if alike.comm is not None:
        with alike.waiting(f"extents of a checkpoint that replica {root} has read"):
            alike.comm.Bcast(packed, root)
    if memory is None:
        exchange.parts.unpack(packed, pieces)


def load_state(reader: CheckpointReader, group: Group) -> dict[str, Any]:
    """All values in a checkpoint that are not tensors. Collective.

    Raises:
        CheckpointUnreadable: a rank cannot read the extents in which they lie.
        CheckpointError: these extents are damaged.
    """
    state = torch.empty(reader.layout.entries[-2].shape, dtype=torch.uint8)
    load_tensors(reader, {STATE: LocalTensor.whole(state)}, group, alike=group)
    return _tree(reader.path, state)


def _tree(path: Path, state: torch.Tensor) -> dict[str, Any]:
    tree = parsed_object(state.numpy().tobytes())
    if tree is None:
        raise CheckpointError(f"checkpoint {path}: its state is no JSON object", BROKEN)
    return tree
