"""Blocks of a shard, and the table of their hashes.

A hash is of a block of HASHED_BYTES bytes. So a reader that needs one sample verifies one block,
and damage is named by dataset and block. The manifest has the hash of the table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from hpc_train import files
from hpc_train.data.manifest import HASHED_BYTES, PREPARE_AGAIN, StoredShard
from hpc_train.errors import DataError

HASH_TYPE = np.dtype("<u8")


def block_hashes(memory: memoryview) -> np.ndarray:
    """The xxh3-64 of each block of some bytes, uint64 (blocks,). The last block may be shorter."""
    begins = range(0, len(memory), HASHED_BYTES)
    found = (xxhash.xxh3_64_intdigest(memory[begin : begin + HASHED_BYTES]) for begin in begins)
    return np.fromiter(found, HASH_TYPE, len(begins))


def hash_of_table(table: np.ndarray) -> str:
    """The hash of a table of hashes, as the manifest has it."""
    return xxhash.xxh3_128_hexdigest(table.data)


def read_table(descriptor: int, path: Path, shard: StoredShard, dtype: str) -> np.ndarray:
    """Read the hashes of the blocks of a shard's datasets, uint64 (blocks,).

    Raises:
        DataError: the table is damaged, or the file ends early.
    """
    offset, nbytes = shard.extents(dtype)["hashes"]
    table = np.empty(nbytes // HASH_TYPE.itemsize, HASH_TYPE)
    count = files.read_into(descriptor, table.view(np.uint8).data, offset)
    if count != nbytes:
        raise ends_early(path)
    if hash_of_table(table) != shard.hash:
        raise DataError(
            f"shard {path} is damaged: its dataset hashes does not have the hash {shard.hash}",
            PREPARE_AGAIN,
        )
    return table


def path_of(path: Path, shard: StoredShard, dataset: str) -> Path:
    """The file that has a dataset of a shard, whose own file is `path`."""
    return path.parent / shard.source if shard.source and dataset == "tokens" else path


def damaged_block(path: Path, shard: StoredShard, dataset: str, block: int) -> DataError:
    """The error for a block that does not have its hash."""
    place, where = f"from byte {block * HASHED_BYTES} on", path_of(path, shard, dataset)
    if where != path:
        place += f", in {where.resolve()}"
    return DataError(
        f"shard {path} is damaged: block {block} of its dataset {dataset} ({place}) does not have "
        "its hash",
        "copy the file again, or prepare the data again",
    )


def beyond_vocabulary(path: Path, block: int, token: int, vocab: int) -> DataError:
    """The error for a block with a token that is not in the vocabulary."""
    return DataError(
        f"shard {path} does not fit its manifest: block {block} of its dataset tokens has the "
        f"token {token}, which is beyond its manifest's vocabulary of {vocab}",
        PREPARE_AGAIN,
    )


def ends_early(path: Path) -> DataError:
    """The error for a shard that became shorter after it was checked."""
    return DataError(f"shard {path} ends early", PREPARE_AGAIN)
