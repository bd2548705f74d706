"""Write token shards safely, as HDF5 files that other programs can read, too."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import h5py
import numpy as np

from hpc_train import files
from hpc_train.data.blocks import block_hashes, hash_of_table
from hpc_train.data.check import damage
from hpc_train.data.manifest import Shard, StoredShard
from hpc_train.errors import DataError

ALIGNMENT = 4096
UNBUFFERED = "unbuffered"
"""A driver that writes data at once, so that the call itself tells of a full disk."""
h5py.register_driver(UNBUFFERED, lambda access: access.set_sieve_buf_size(0))


def write_shard(
    path: Path,
    tokens: np.ndarray,
    documents: np.ndarray | None = None,
    about: Mapping[str, str] | None = None,
    source: tuple[Path, int] | None = None,
) -> Shard:
    """Write one shard, then read it back and compare.

    Args:
        path: a new file, in a folder that is not published yet.
        tokens: the tokens (N,), of a type in `manifest.TOKEN_BYTES`.
        documents: positions at which documents begin, int64 (D,), rising; by default one at 0.
        about: attributes of the file, such as the tokenizer and the source.
        source: a file that has the tokens, and the offset of the first one. The shard then refers
            to it, through a link beside the shard, and has no copy of the tokens.

    Raises:
        DataError: the file has other tokens than were written.
        OSError: the file cannot be written.
    """
    begins = np.zeros(1, "<i8") if documents is None else documents.astype("<i8")
    link = _link_to(source[0], path.parent) if source else ""
    columns = {"tokens": tokens, "documents": begins}
    offsets, digest = write_datasets(path, columns, about, source)
    shard = Shard(
        name=path.name,
        file_bytes=path.stat().st_size,
        source=link,
        tokens=len(tokens),
        offset=offsets["tokens"],
        documents=len(begins),
        documents_offset=offsets["documents"],
        hashes_offset=offsets["hashes"],
        hash=digest,
    )
    check_written(path, shard, str(tokens.dtype))
    return shard


def write_datasets(
    path: Path,
    columns: Mapping[str, np.ndarray],
    about: Mapping[str, str] | None = None,
    source: tuple[Path, int] | None = None,
) -> tuple[dict[str, int], str]:
    """Write an HDF5 file of contiguous datasets, and of the hashes of their blocks, durably.

    Args:
        path: a new file.
        columns: the datasets by name; samples are in the first one.
        about: attributes of the file.
        source: a file that has the first dataset, and the offset of it there.

    Returns:
        The offset of each dataset and of `hashes` in its file, 0 for empty ones, and the hash of
        `hashes`.

    Raises:
        OSError: the file cannot be written.
    """
    main = next(iter(columns))
    hashes = np.concatenate([block_hashes(_bytes_of(column)) for column in columns.values()])
    digest = hash_of_table(hashes)
    every = {**columns, "hashes": hashes}
    how = {"driver": UNBUFFERED, "alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    with _storage_errors(), h5py.File(path, "x", **how) as file:
        file.attrs.update(about or {})
        # All descriptions come first, and all data behind them: `check_shard` looks for the
        # descriptions at the beginning of the file.
        outside = None
        if source:
            outside = [(str(source[0].absolute()), source[1], columns[main].nbytes)]
        for name, column in every.items():
            place = outside if name == main else None
            file.create_dataset(name, column.shape, column.dtype, external=place)
        file[main].attrs["hash"] = digest
        for name, column in every.items():
            if len(column) and not (source and name == main):
                file[name][:] = column
        offsets = {name: file[name].id.get_offset() or 0 for name in every}
    files.sync(path)
    if source:
        offsets[main] = source[1]
    return offsets, digest


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Turn what h5py raises if the disk fails, a RuntimeError when it closes, into an OSError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        code = re.search(r"errno = (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def check_written(path: Path, shard: StoredShard, dtype: str) -> None:
    """Read a new shard back.

    Raises:
        DataError: the file has other data than were written.
    """
    if cause := damage(path, shard, dtype):
        raise DataError(f"the disk did not keep what was written ({cause})", "check the disk")


def _bytes_of(column: np.ndarray) -> memoryview:
    return column.view(np.uint8).data if len(column) else memoryview(b"")


def _link_to(source: Path, folder: Path) -> str:
    """Make a link to a file, and return its name. It is the same for the same file."""
    target = str(source.absolute())
    name = f"source-{hashlib.blake2b(target.encode(), digest_size=8).hexdigest()}.bin"
    with suppress(FileExistsError):
        (folder / name).symlink_to(target)
    return name
