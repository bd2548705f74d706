"""Read a checkpoint: rank 0 reads and verifies each extent, and all ranks receive it.

Every byte is read from the file system once, whatever the number of ranks, and one extent is in
memory at a time.
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
from hpc_train.mpi.agreement import from_first
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

    def extent(self, number: int) -> bytes:
        """One extent's bytes, verified.

        Raises:
            CheckpointError: they cannot be read or are not what was saved.
        """
        begin, end = self.layout.extent(number)
        try:
            with self.path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), end - begin, self.layout.data_start + begin)
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.path}: {error.strerror}") from None
        if fileformat.hash_of(data) != self.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
            raise CheckpointError(
                f"checkpoint {self.path}: data bytes {begin} to {end} are not what was saved",
                BROKEN,
            )
        return data


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
    for number in range(layout.extents):
        begin, end = layout.extent(number)
        if any(entry.name in names for entry in fileformat.names_between(layout, begin, end)):
            data = from_first(group, functools.partial(reader.extent, number))
            fileformat.write_bytes(held, layout, begin, end, data)


def load_state(reader: Reader, group: Group) -> Any:
    """The JSON tree of what is no tensor. Collective.

    Raises:
        CheckpointError: the extent that it lies in is damaged.
    """
    state = torch.empty(reader.layout.entries[-2].shape, dtype=torch.uint8)
    load(reader, {STATE: Held.whole(state)}, group)
    return json.loads(state.numpy().tobytes())
