"""Samples of tokens, read from the shards of a data folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train.data.manifest import Manifest
from hpc_train.data.shard_files import ShardFiles
from hpc_train.errors import DataError

TOGETHER_BYTES = 1 << 18  # bytes of the samples that are shuffled as one block


class TokenDataset:
    """Samples of consecutive tokens, read from the shards by file offset.

    A sample has `sequence` tokens, and as targets the token that follows each of them. Samples
    overlap only in the last target, and do not cross shards. Several threads may call `fetch`; one
    at a time is served.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train" or "validation".
        sequence: tokens per sample, T.

    Raises:
        DataError: the split has no whole sample.

    The attribute `samples_per_block` says how many neighbours are worth reading one after another.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str, sequence: int) -> None:
        self.files = ShardFiles(directory, manifest, split)
        self.sequence = sequence
        itemsize = self.files.dtype.itemsize
        self.stride = sequence * itemsize  # bytes from a sample to the next one
        self.nbytes = np.array([self.stride + itemsize], np.int64)  # of a sample
        self.samples_per_block = max(1, TOGETHER_BYTES // self.stride)
        counts = np.array([(shard.tokens - 1) // sequence for shard in self.files.shards], np.int64)
        self.ends = counts.cumsum()
        self.skipped = (self.ends - counts) * self.stride  # bytes of the samples in earlier shards
        self._renew()
        if len(self) == 0:
            raise DataError(
                f"split {split} of {directory} has {manifest.tokens(split)} tokens in "
                f"{len(counts)} shards: not one sample of {sequence} + 1",
                "prepare more text, or use a smaller model.sequence",
            )

    def _renew(self) -> None:
        self._fetching = threading.Lock()
        self._memory = np.empty(0, self.files.dtype)  # tokens of a batch as they are stored
        self._rows: list[list[memoryview]] = []  # its parts for one sample each

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy in a worker."""
        fresh = ("_fetching", "_memory", "_rows")
        return {key: value for key, value in vars(self).items() if key not in fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._renew()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def fetch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Read samples.

        Returns:
            Tokens and targets, int64 of shape (len(indices), T) each.

        Raises:
            DataError: a shard cannot be read, ends early or is damaged, or a token is not in the
                vocabulary.
        """
        wanted, order = np.asarray(indices, np.int64), None
        steps = wanted[1:] - wanted[:-1]
        if steps.size and steps.min() < 0:
            # In the order of the files a disk's head and read-ahead have the least to do.
            order = wanted.argsort(kind="stable")
            wanted = wanted[order]
            steps = wanted[1:] - wanted[:-1]
        numbers = self.ends.searchsorted(wanted, "right")
        begins = wanted * self.stride - self.skipped[numbers]
        rows = np.empty((len(wanted), self.sequence + 1), np.int64)
        neighbours = (steps == 1) & (begins[1:] > 0)  # of one shard, so they share a token
        with self._fetching:
            self._reserve(len(wanted))
            if neighbours.any():
                self._read_runs(numbers, begins, neighbours, rows, order)
            else:
                places = range(len(wanted)) if order is None else order.tolist()
                self.files.read(numbers, begins, self.nbytes, [self._rows[n] for n in places])
                np.copyto(rows, self._memory[: rows.size].reshape(rows.shape))
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])

    def _read_runs(
        self,
        numbers: np.ndarray,
        begins: np.ndarray,
        neighbours: np.ndarray,
        rows: np.ndarray,
        order: np.ndarray | None,
    ) -> None:
        """Read samples of which some are neighbours. Those are one read."""
        firsts = np.concatenate([[0], np.flatnonzero(~neighbours) + 1])
        counts = np.diff(firsts, append=len(numbers))
        sizes = counts * self.sequence + 1
        runs = np.split(self._memory[: sizes.sum()], sizes[:-1].cumsum())
        memories = [[run.view(np.uint8).data] for run in runs]
        nbytes = sizes * self.files.dtype.itemsize
        self.files.read(numbers[firsts], begins[firsts], nbytes, memories)
        for run, first, count in zip(runs, firsts.tolist(), counts.tolist(), strict=True):
            places = slice(first, first + count) if order is None else order[first : first + count]
            rows[places, :-1] = run[:-1].reshape(count, self.sequence)
            rows[places, -1] = run[self.sequence :: self.sequence]

    def _reserve(self, samples: int) -> None:
        """Have memory for a number of samples. It is kept, as new memory takes time."""
        if samples <= len(self._rows):
            return
        self._memory = np.empty(samples * (self.sequence + 1), self.files.dtype)
        rows = self._memory.reshape(samples, -1).view(np.uint8)
        self._rows = [[row.data] for row in rows]

    def close(self) -> None:
        """Close the shards."""
        self.files.close()
