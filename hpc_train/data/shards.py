"""Samples of tokens, read from the shards of a data folder."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train import files
from hpc_train.data.manifest import PREPARE_AGAIN, Manifest
from hpc_train.errors import DataError

MAX_OPEN_FILES = 128


class TokenDataset:
    """Samples of consecutive tokens, read from the shards by file offset.

    A sample has `sequence` tokens, and as targets the token that follows each of them. Samples
    overlap only in the last target, and do not cross shards. Several threads may call `fetch`; they
    read one at a time.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train" or "validation".
        sequence: tokens per sample, T.

    Raises:
        DataError: the split has no whole sample.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str, sequence: int) -> None:
        self.directory = directory
        self.shards = manifest.splits.get(split, ())
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.vocab = manifest.vocab
        self.sequence = sequence
        counts = [(shard.tokens - 1) // sequence for shard in self.shards]
        self.ends = np.cumsum(counts, dtype=np.int64)
        self._files: OrderedDict[int, int] = OrderedDict()
        self._reading = threading.Lock()  # opening a shard may close one that is being read
        if len(self) == 0:
            raise DataError(
                f"split {split} of {directory} has {manifest.tokens(split)} tokens in "
                f"{len(self.shards)} shards: not one sample of {sequence} + 1",
                "prepare more text, or use a smaller model.sequence",
            )

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy in a worker, which opens the shards itself."""
        return {**vars(self), "_files": OrderedDict(), "_reading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _reading=threading.Lock())

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def fetch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Read samples.

        Returns:
            Tokens and targets, int64 of shape (len(indices), T) each.

        Raises:
            DataError: a shard cannot be read or ends early, or a token is not in the vocabulary.
        """
        rows = np.empty((len(indices), self.sequence + 1), self.dtype)
        with self._reading:
            for row, index in zip(rows, indices, strict=True):
                self._read(int(index), row)
        if rows.size and (largest := int(rows.max())) >= self.vocab:
            raise DataError(
                f"token {largest} in {self.directory} is beyond its manifest's vocabulary of "
                f"{self.vocab}",
                PREPARE_AGAIN,
            )
        wide = torch.from_numpy(rows.astype(np.int64))
        return wide[:, :-1], wide[:, 1:]

    def _read(self, index: int, row: np.ndarray) -> None:
        number = int(np.searchsorted(self.ends, index, side="right"))
        within = index - (int(self.ends[number - 1]) if number else 0)
        shard = self.shards[number]
        offset = shard.offset + within * self.sequence * self.dtype.itemsize
        try:
            count = files.read_into(self._open(number), row.view(np.uint8).data, offset)
        except OSError as error:
            path = self.directory / shard.name
            raise DataError(f"shard {path}: {error.strerror}", "check the file system") from None
        if count != row.nbytes:
            raise DataError(f"shard {self.directory / shard.name} ends early", PREPARE_AGAIN)

    def _open(self, number: int) -> int:
        if number in self._files:
            self._files.move_to_end(number)
            return self._files[number]
        if len(self._files) == MAX_OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        path = self.directory / self.shards[number].name
        self._files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[number]

    def close(self) -> None:
        """Close the shards."""
        with self._reading:
            while self._files:
                os.close(self._files.popitem()[1])
