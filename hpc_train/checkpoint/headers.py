"""What a checkpoint says of itself without its tensors, and so without torch; those of a run."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpc_train import files
from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.directory import find_checkpoints
from hpc_train.checkpoint.fileformat import MAX_HEADER_BYTES, FileMap
from hpc_train.checkpoint.reading import patiently
from hpc_train.errors import CheckpointError, CheckpointMismatch, CheckpointUnreadable

BROKEN = "it is damaged: use an older one, or delete it"


def read_header(path: Path) -> tuple[FileMap, bytes]:
    """Read and check a file's header and hash table; returns its layout and the extents' hashes.

    Raises:
        CheckpointMismatch: it is a safetensors file of somebody else, or of another version.
        CheckpointUnreadable: the file is missing, or the file system does not give it.
        CheckpointError: it was never committed, or is damaged.
    """
    try:
        layout, table, table_hash = patiently(path, _parts)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{path}: {error.cause}", error.remedy) from None
    except CheckpointUnreadable:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error.cause}", BROKEN) from None
    if fileformat.hash_of(table).hex() != table_hash:
        raise CheckpointError(f"checkpoint {path}: its hash table is wrong", BROKEN)
    return layout, table


def _parts(descriptor: int) -> tuple[FileMap, bytes, str]:
    """The layout, the hash table, and the hash that it must have."""
    size = files.call("size", os.fstat, descriptor).st_size
    length = int.from_bytes(files.read_at(descriptor, 8, 0), "little")
    if not 0 < length <= min(size, MAX_HEADER_BYTES + fileformat.FILE_ALIGNMENT):
        raise CheckpointError("it was never completed")
    layout, table_hash = fileformat.parse_header(files.read_at(descriptor, length, 8), size)
    begin = layout.data_start + layout.content_bytes
    return layout, files.read_at(descriptor, layout.file_bytes - begin, begin), table_hash


@dataclass(frozen=True)
class Listed:
    """One checkpoint of a run.

    Args:
        path: the file.
        nbytes: of the file.
        written: when.
        damage: what is wrong with its header, or "".
        finite: whether its trained parameters were all finite.
    """

    path: Path
    nbytes: int
    written: datetime
    damage: str
    finite: bool = True


def listed(run: Path) -> list[Listed]:
    """The checkpoints of a run directory, newest first; no tensor is read.

    Raises:
        CheckpointMismatch: it has none.
    """
    found = find_checkpoints(run / "checkpoints", "auto") or find_checkpoints(run, "auto")
    if not found:
        raise CheckpointMismatch(f"{run} has no checkpoints", "give a run directory")
    return [_listed(path) for path in found]


def _listed(path: Path) -> Listed:
    damage, finite = "", True
    try:
        layout, _ = read_header(path)
        finite = _is_finite(path, layout)
    except (CheckpointError, CheckpointMismatch) as error:
        damage = error.cause.removeprefix(f"checkpoint {path}: ")
    status = path.stat()
    written = datetime.fromtimestamp(status.st_mtime)
    return Listed(path, status.st_size, written, damage, finite)


def _is_finite(path: Path, layout: FileMap) -> bool:
    """What the checkpoint's state says, of which only a look is taken: nothing is verified."""
    entry = layout.entries[-2]
    with suppress(OSError, ValueError, AttributeError), files.opened(path) as descriptor:
        size, begin = entry.end - entry.begin, layout.data_start + entry.begin
        return json.loads(files.read_at(descriptor, size, begin)).get("finite", True) is True
    return True
