"""An open shard, with the hashes of its blocks, and its copy in the node's cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpc_train import files
from hpc_train.data.block_cache import BlockCache
from hpc_train.data.blocks import ends_early, read_table
from hpc_train.data.check import close_shard, open_shard, unreadable_shard
from hpc_train.data.manifest import StoredShard

Identity = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class OpenedShard:
    """An open shard.

    Args:
        path: its file.
        shard: the manifest's entry for it.
        descriptors: for each dataset that of the file that has it; samples are in the first one.
        identity: what tells the file that has the samples from another one, and from itself after a
            change: device, inode, size and time of change.
        table: the hashes of its blocks.
        copy: a descriptor of the copy of the file that has the samples; -1: there is none.
    """

    path: Path
    shard: StoredShard
    descriptors: Mapping[str, int]
    identity: Identity
    table: np.ndarray
    copy: int

    @classmethod
    def open(
        cls, path: Path, shard: StoredShard, dtype: str, cache: BlockCache | None
    ) -> OpenedShard:
        """Open and check a shard.

        Raises:
            DataError: it is not the one that the manifest describes, or cannot be read.
            HpcTrainError: the system opens no more files.
        """
        descriptors = open_shard(path, shard, dtype)
        try:
            found = os.fstat(next(iter(descriptors.values())))
            table = read_table(descriptors["hashes"], path, shard, dtype)
        except OSError as error:
            close_shard(descriptors)
            raise unreadable_shard(path, error) from None
        except BaseException:
            close_shard(descriptors)
            raise
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        copy = -1 if cache is None else cache.open(shard.source or shard.name, found.st_size)
        return cls(path, shard, descriptors, identity, table, copy)

    def has_changed(self) -> bool:
        """Whether somebody has written to the file that has the samples."""
        found = os.fstat(
            next(iter(self.descriptors.values()))
        )  # of an open file only these can change
        return (found.st_size, found.st_mtime_ns) != self.identity[2:]

    def copy_of(self, dataset: str) -> int:
        """A descriptor of the copy of the file that has a dataset; -1: there is none."""
        return -1 if self.shard.source and dataset != "tokens" else self.copy

    def fill(self, dataset: str, memory: memoryview, begin: int) -> None:
        """Fill memory with the bytes of a dataset from a place in its file on.

        Raises:
            DataError: the file cannot be read, or ends early.
        """
        try:
            count = files.read_into(self.descriptors[dataset], memory, begin)
        except OSError as error:
            raise unreadable_shard(self.path, error) from None
        if count < len(memory):
            raise ends_early(self.path)

    def close(self) -> None:
        """Close its files."""
        close_shard(self.descriptors)
        if self.copy >= 0:
            os.close(self.copy)


def why_unread(descriptor: int, memory: memoryview, begin: int) -> OSError | None:
    """Fill memory with the bytes of a copy from a place on. Returns why that failed."""
    try:
        if files.read_into(descriptor, memory, begin) == len(memory):
            return None
    except OSError as error:
        return error
    return OSError(errno.EIO, "a shard's copy was truncated")
