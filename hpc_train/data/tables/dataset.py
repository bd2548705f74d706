"""Rows of a prepared table, read from the shards of its folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hpc_train.data.block_cache import BlockCache
from hpc_train.data.shard_files import Renewed, ShardFiles
from hpc_train.data.tables.features import TableFeatures
from hpc_train.data.tables.table_manifest import WORD_BYTES, TableManifest, row_type
from hpc_train.data.tables.transfer import rescaling
from hpc_train.errors import DataError

ROWS_BYTES = 1 << 18  # bytes of the rows that are shuffled as one block
SINGLE_SHARE = 0.5  # with a larger share of runs among the rows, each row is read by itself

TableBatch = tuple[Tensor, Tensor, Tensor, Tensor]


class TableDataset(Renewed):
    """Rows of a prepared table, read from the shards by file offset.

    Several threads may call `fetch`; one at a time is served.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train" or "validation".
        cache: the cache of the shards' blocks on this node; None: there is none.
        dtype: type of the numbers in batches: torch.float32 or torch.float64.
        read_as: the table's features with other statistics (`data.tables.transfer`), with which
            the numbers are read; by default those with which the table was prepared.

    Raises:
        DataError: the split has no rows.

    The attribute `features` has what the rows are made of, and `samples_per_block` says how many
    neighbours are worth reading one after another.
    """

    draws_random_numbers: ClassVar[bool] = False  # see `Reader.may_draw`
    fresh = ("_fetching", "_rows", "_places")

    def __init__(
        self,
        directory: Path,
        manifest: TableManifest,
        split: str,
        cache: BlockCache | None = None,
        dtype: torch.dtype = torch.float32,
        read_as: TableFeatures | None = None,
    ) -> None:
        self.files = ShardFiles(directory, manifest, split, cache)
        self.features = read_as or manifest.features
        self.rescaling = rescaling(manifest.features, self.features)
        self.dtype = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        self.type = row_type(manifest.features)
        self.nbytes = self.type.itemsize
        self.samples_per_block = max(1, ROWS_BYTES // self.nbytes)
        counts = np.array([shard.rows for shard in self.files.shards], np.int64)
        self.ends = counts.cumsum()
        self.skipped = (self.ends - counts) * self.nbytes  # bytes of the rows in earlier shards
        self._renew()
        if len(self) == 0:
            raise DataError(
                f"split {split} of {directory} has no rows",
                "prepare the table with another --validation",
            )

    def _renew(self) -> None:
        self._fetching = threading.Lock()
        self._rows = np.empty(0, self.type)  # the places for rows of a batch
        self._places: list[list[memoryview]] = []  # of each of them

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def fetch(self, indices: Sequence[int] | np.ndarray) -> TableBatch:
        """Read rows.

        Returns:
            numeric: float (B, number of numeric features), NaN where a value is missing.
            categorical: int64 (B, number of categorical features), codes.
            target: int64 (B,) class numbers; or float (B,) scaled values; or float (B, labels) of 0
                and 1; or float (B, 0) if the table has no target.
            weight: float (B,), of mean 1 over the training split.

        Raises:
            IndexError: there is no such row.
            DataError: a shard cannot be read, ends early or is damaged.
            HpcTrainError: the system has no memory, or opens no more files.
        """
        wanted = np.asarray(indices, np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"rows are numbered from 0 to {len(self) - 1}")
        order = None
        if (wanted[1:] < wanted[:-1]).any():
            # In the order of the files a disk's head and read-ahead have the least to do.
            order = wanted.argsort(kind="stable")
            wanted = wanted[order]
        numbers = self.ends.searchsorted(wanted, "right")
        begins = wanted * self.nbytes - self.skipped[numbers]
        with self._fetching:
            self._reserve(len(wanted))
            self._fill(numbers, begins)
            return self._batch(self._rows[: len(wanted)], order)

    def _fill(self, numbers: np.ndarray, begins: np.ndarray) -> None:
        """Read rows, rising, into their places."""
        count = len(numbers)
        if not count:
            return
        apart = (begins[1:] - begins[:-1] != self.nbytes) | (numbers[1:] != numbers[:-1])
        firsts = np.append(0, np.flatnonzero(apart) + 1)
        if len(firsts) > SINGLE_SHARE * count:
            self.files.read(numbers, begins, self.nbytes, self._places[:count], "rows")
            return
        ends = [*firsts[1:].tolist(), count]
        memory = self._rows.view(np.uint8)
        memories = [
            [memory[first * self.nbytes : end * self.nbytes].data]
            for first, end in zip(firsts.tolist(), ends, strict=True)
        ]
        sizes = np.array([one[0].nbytes for one in memories], np.int64)
        self.files.read(numbers[firsts], begins[firsts], sizes, memories, "rows")

    def _reserve(self, rows: int) -> None:
        """Have places for some rows."""
        if rows > len(self._places):
            self._rows = np.empty(rows, self.type)
            each = self._rows.view(np.uint8).reshape(rows, self.nbytes)
            self._places = [[row.data] for row in each]

    def _batch(self, rows: np.ndarray, order: np.ndarray | None) -> TableBatch:
        count, of = len(rows), self.features.target
        words = rows.view("<u4").reshape(count, self.nbytes // WORD_BYTES)
        numeric = len(self.features.numeric)
        coded = numeric + len(self.features.categorical)
        target = words[:, coded:-1]
        if of is None or of.task == "multilabel":
            found = self._taken(target, "<f4", self.dtype, order)
        elif of.task == "classification":
            found = self._taken(target[:, 0], "<i4", np.dtype(np.int64), order)
        else:
            found = self._taken(target[:, 0], "<f4", self.dtype, order)
        return (
            self._numbers(words[:, :numeric], order),
            self._taken(words[:, numeric:coded], "<i4", np.dtype(np.int64), order),
            found,
            self._taken(words[:, -1], "<f4", self.dtype, order),
        )

    def _numbers(self, words: np.ndarray, order: np.ndarray | None) -> Tensor:
        if self.rescaling is None:
            return self._taken(words, "<f4", self.dtype, order)
        factors, summands = map(torch.from_numpy, self.rescaling)
        exact = self._taken(words, "<f4", np.dtype(np.float64), order)
        return (
            exact.mul_(factors).add_(summands).to(torch.from_numpy(np.empty(0, self.dtype)).dtype)
        )

    def _taken(
        self, words: np.ndarray, stored: str, kind: np.dtype[Any], order: np.ndarray | None
    ) -> Tensor:
        """A copy of some words of the rows, in the order in which they were asked for."""
        made = np.empty(words.shape, kind)
        made[slice(None) if order is None else order] = words.view(stored)
        return torch.from_numpy(made)

    def close(self) -> None:
        """Close the shards."""
        self.files.close()
