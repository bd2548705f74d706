"""Read a checkpoint: each extent is read and verified by one rank, and all ranks receive it.

Every byte is read from the file system once, whatever the number of ranks, and two extents are in
the memory of a rank at a time.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_train import files
from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.fileformat import (
    HASH_BYTES,
    HASHES,
    MAX_HEADER_BYTES,
    STATE,
    Entry,
    Held,
    Layout,
)
from hpc_train.errors import CheckpointError, CheckpointMismatch
from hpc_train.mpi.agreement import agreed, from_first
from hpc_train.mpi.group import Group

BROKEN = "it is damaged: use an older one, or delete it"


@dataclass(frozen=True)
class Reader:
    """A committed checkpoint file whose header is sound.

    Args:
        path: the file.
        layout: where everything lies in it.
        table: the extents' hashes.
    """

    path: Path
    layout: Layout
    table: bytes

    @classmethod
    def open(cls, path: Path) -> Reader:
        """Read and check header and hash table.

        Raises:
            CheckpointMismatch: it is a safetensors file of somebody else.
            CheckpointError: the file is missing, was never committed, or is damaged.
        """
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(size, MAX_HEADER_BYTES + fileformat.ALIGNMENT):
                    raise CheckpointError("it was never completed")
                layout, table_hash = fileformat.parse(file.read(length), size)
                file.seek(layout.data_start + layout.content_bytes)
                table = file.read()
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: {error.strerror}") from None
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{path}: {error.cause}", error.remedy) from None
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {path}: {error.cause}", BROKEN) from None
        if fileformat.hash_of(table).hex() != table_hash:
            raise CheckpointError(f"checkpoint {path}: its hash table is wrong", BROKEN)
        return cls(path, layout, table)

    @property
    def entries(self) -> dict[str, Entry]:
        """The tensors in it, by name."""
        return {e.name: e for e in self.layout.entries if e.name not in (STATE, HASHES)}

    def extent(self, number: int) -> bytearray:
        """One extent's bytes, verified.

        Raises:
            CheckpointError: they cannot be read or are not what was saved.
        """
        begin, end = self.layout.extent(number)
        try:
            with files.opened(self.path) as descriptor:
                data = files.read_at(descriptor, end - begin, self.layout.data_start + begin)
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.path}: {error.strerror}") from None
        if fileformat.hash_of(data) != self.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
            raise CheckpointError(
                f"checkpoint {self.path}: data bytes {begin} to {end} are not what was saved",
                BROKEN,
            )
        return data


class Tensors:
    """The tensors of a checkpoint by name, one at a time, verified, in one process.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is damaged; also by each access.
        CheckpointMismatch: it is not of hpc_train.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, Reader.open(path)
        self.entries = {entry.name: entry for entry in self.reader.layout.entries}
        self.names = list(self.reader.entries)
        # Small tensors lie together in one extent, which is read for the first of them only.
        self._extent = functools.lru_cache(maxsize=1)(self.reader.extent)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry, layout = self.entries[name], self.reader.layout
        tensor = torch.empty(entry.shape, dtype=fileformat.TORCH_DTYPES[entry.dtype])
        held = {name: Held.whole(tensor)}
        for number in range(
            entry.begin // fileformat.EXTENT_BYTES, -(-entry.end // fileformat.EXTENT_BYTES)
        ):
            fileformat.write_bytes(held, layout, *layout.extent(number), self._extent(number))
        return tensor

    def state(self) -> dict[str, Any]:
        """The JSON tree of what is no tensor."""
        return _tree(self.path, self[STATE])


def open_together(path: Path, group: Group) -> Reader:
    """Open a checkpoint on rank 0 and hand its header to all. Collective.

    Raises:
        CheckpointError: it cannot be used.
    """
    return from_first(group, lambda: Reader.open(path))


def load(
    reader: Reader, held: Mapping[str, Held], group: Group, names: Collection[str] | None = None
) -> None:
    """Fill tensors from a checkpoint, reading only the extents that they lie in. Collective.

    Args:
        reader: from `open_together`.
        held: this rank's parts, by name, of the dtypes and whole shapes that the checkpoint has.
        group: the ranks that receive.
        names: what all ranks together hold; by default what this one does.

    Raises:
        CheckpointError: an extent is damaged; some tensors may have been filled.
    """
    layout, names = reader.layout, held.keys() if names is None else names
    wanted = [
        number
        for number in range(layout.extents)
        if any(e.name in names for e in fileformat.names_between(layout, *layout.extent(number)))
    ]
    for first in range(0, len(wanted), group.size):
        together = wanted[first : first + group.size]  # one for each rank
        mine = bytearray()
        with agreed(group):
            if group.rank < len(together):
                mine = reader.extent(together[group.rank])
        for root, number in enumerate(together):
            begin, end = layout.extent(number)
            data = _from(root, mine, end - begin, group)
            fileformat.write_bytes(held, layout, begin, end, data)


def _from(root: int, mine: bytearray, nbytes: int, group: Group) -> bytearray:
    """What this rank has, or so many bytes that rank `root` has. Collective."""
    if group.comm is None:
        return mine
    data = mine if group.rank == root else bytearray(nbytes)
    with group.waiting(f"an extent of a checkpoint, which rank {root} has read"):
        group.comm.Bcast(data, root)
    return data


def load_state(reader: Reader, group: Group) -> dict[str, Any]:
    """The JSON tree of what is no tensor. Collective.

    Raises:
        CheckpointError: the extent that it lies in is damaged.
    """
    state = torch.empty(reader.layout.entries[-2].shape, dtype=torch.uint8)
    load(reader, {STATE: Held.whole(state)}, group)
    return _tree(reader.path, state)


def _tree(path: Path, state: torch.Tensor) -> dict[str, Any]:
    try:
        tree = json.loads(state.numpy().tobytes())
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise CheckpointError(f"checkpoint {path}: its state is no JSON object", BROKEN)
    return tree
