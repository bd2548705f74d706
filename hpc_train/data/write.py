"""Write token shards safely, as HDF5 files that other programs can read, too."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import xxhash

from hpc_train import files
from hpc_train.data.check import damage
from hpc_train.data.manifest import Shard
from hpc_train.errors import DataError

ALIGNMENT = 4096


def write_shard(path: Path, tokens: np.ndarray, documents: np.ndarray) -> Shard:
    """Write one shard, then read it back and compare.

    Args:
        path: a new file, in a folder that is not published yet.
        tokens: the tokens (N,), of a type in `manifest.TOKEN_BYTES`.
        documents: the positions (D,) int64 at which documents begin, ascending. A shard that
            continues a document has no 0 in it.

    Raises:
        DataError: the file has other tokens than were written.
        OSError: the file cannot be written.
    """
    expected = xxhash.xxh3_128_hexdigest(tokens.data)
    with h5py.File(path, "x", alignment_threshold=1, alignment_interval=ALIGNMENT) as file:
        dataset = file.create_dataset("tokens", data=tokens)
        dataset.attrs["hash"] = expected
        offset = dataset.id.get_offset()
    files.sync(path)
    shard = Shard(path.name, path.stat().st_size, len(tokens), offset, expected)
    if cause := damage(path, shard, str(tokens.dtype)):
        raise DataError(f"the disk did not keep what was written ({cause})", "check the disk")
    return shard
