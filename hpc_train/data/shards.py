"""Token shards: write them safely, check them against the manifest, read samples from them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch
import xxhash
from torch import Tensor

from hpc_train import files
from hpc_train.data.manifest import PREPARE_AGAIN, Manifest, Shard
from hpc_train.errors import DataError

MAX_OPEN_FILES = 128
ALIGNMENT = 4096


def write_shard(path: Path, tokens: np.ndarray) -> Shard:
    """Write one shard, then read it back and compare.

    Args:
        path: a new file, in a folder that is not published yet.
        tokens: one dimension, unsigned integers.

    Raises:
        DataError: what is on the disk is not what was written.
        OSError: the file cannot be written.
    """
    expected = xxhash.xxh3_128_hexdigest(tokens.data)
    with h5py.File(path, "x", alignment_threshold=1, alignment_interval=ALIGNMENT) as file:
        dataset = file.create_dataset("tokens", data=tokens)
        dataset.attrs["hash"] = expected
        offset = dataset.id.get_offset()
    files.sync(path)
    with path.open("rb") as written:
        written.seek(offset)
        found = xxhash.xxh3_128_hexdigest(written.read(tokens.nbytes))
    if found != expected:
        raise DataError(f"{path}: the disk did not keep what was written", "check the disk")
    return Shard(path.name, path.stat().st_size, len(tokens), offset, expected)


def check_shards(directory: Path, manifest: Manifest) -> None:
    """Check every shard of the manifest: existence, size, and what its HDF5 header says.

    Raises:
        DataError: a shard is missing, truncated, or not the one that the manifest describes.
    """
    for shards in manifest.splits.values():
        for shard in shards:
            _check_shard(directory / shard.name, shard, manifest)


def _check_shard(path: Path, shard: Shard, manifest: Manifest) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"shard {path} is missing", PREPARE_AGAIN) from None
    if size != shard.file_bytes:
        raise DataError(
            f"shard {path} has {size} bytes, its manifest says {shard.file_bytes}", PREPARE_AGAIN
        )
    try:
        # Locks fail on some shared file systems, and nobody writes to a published shard.
        with h5py.File(path, "r", locking=False) as file:
            tokens = file["tokens"]
            found = (len(tokens), str(tokens.dtype), tokens.id.get_offset(), tokens.attrs["hash"])
    except (OSError, KeyError, TypeError) as error:
        raise DataError(f"shard {path} is damaged ({error})", PREPARE_AGAIN) from None
    if found != (shard.tokens, manifest.dtype, shard.offset, shard.hash):
        raise DataError(f"shard {path} is not the one its manifest describes", PREPARE_AGAIN)


class TokenDataset:
    """Samples of consecutive tokens, read from the shards by file offset.

    A sample is `sequence` tokens and for each the token that follows it; samples do not overlap,
    apart from that one token, and do not cross shards.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train" or "validation".
        sequence: tokens per sample, T.

    Raises:
        DataError: the split has less than one sample.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str, sequence: int) -> None:
        self.directory = directory
        self.shards = manifest.splits.get(split, ())
        self.dtype = np.dtype(manifest.dtype)
        self.vocab = manifest.vocab
        self.sequence = sequence
        counts = [(shard.tokens - 1) // sequence for shard in self.shards]
        self.ends = np.cumsum(counts, dtype=np.int64)
        self._files: OrderedDict[int, int] = OrderedDict()
        if len(self) == 0:
            raise DataError(
                f"split {split} of {directory} has {manifest.tokens(split)} tokens in "
                f"{len(self.shards)} shards: not one sample of {sequence} + 1",
                "prepare more text, or use a smaller model.sequence",
            )

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def fetch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Read samples.

        Returns:
            Tokens and targets, int64 of shape (len(indices), T) each.

        Raises:
            DataError: a shard cannot be read or ends early.
        """
        rows = np.empty((len(indices), self.sequence + 1), self.dtype)
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
            count = os.preadv(self._open(number), [row.data], offset)
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
        while self._files:
            os.close(self._files.popitem()[1])
