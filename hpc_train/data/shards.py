"""Samples of tokens, read from the shards of a data folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from sys import getrefcount
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hpc_train.data.ahead import AHEAD_BYTES, Ahead
from hpc_train.data.block_cache import BlockCache
from hpc_train.data.manifest import HASHED_BYTES, Manifest, read_manifest
from hpc_train.data.shard_files import Renewed, ShardFiles
from hpc_train.data.substitutes import Substitutes
from hpc_train.errors import ConfigError, DataError, plural

TOGETHER_BYTES = 1 << 18  # bytes of the samples that are shuffled as one block
ALIGNED = 64  # bytes
MOST_KEPT = 8  # most batches whose memory is used again
_one = [np.empty(0)]
ALONE = getrefcount(_one[0])  # of an array to which a list alone refers; versions of Python differ


@dataclass(frozen=True, eq=False)
class _Memory:
    """Memory of a batch: its inputs and its targets, int64 (N, T) each.

    They share none: a program may change its targets and keep its inputs.
    """

    parts: list[np.ndarray]

    def is_free(self) -> bool:
        """Whether no tensor refers to it. Tensors that are made of a part refer to the part."""
        return getrefcount(self.parts[0]) == ALONE == getrefcount(self.parts[1])

    def fill(self, places: slice | np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Copy the inputs and the targets of some samples to their places in the batch."""
        self.parts[0][places] = inputs
        self.parts[1][places] = targets

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The inputs and the targets."""
        return torch.from_numpy(self.parts[0]), torch.from_numpy(self.parts[1])


def has_one_sample(manifest: Manifest, split: str, sequence: int) -> bool:
    """Whether a split has a sample of `sequence` tokens and their targets, within one shard."""
    return any(shard.tokens > sequence for shard in manifest.splits.get(split, ()))


def check_one_sample(directory: Path, manifest: Manifest, split: str, sequence: int) -> None:
    """Check that a split has at least one sample of `sequence` tokens and their targets.

    Raises:
        DataError: it has none.
    """
    if has_one_sample(manifest, split, sequence):
        return
    tokens, shards = manifest.tokens(split), manifest.splits.get(split, ())
    raise DataError(
        f"split {split} of {directory} has {plural(tokens, 'token')} in "
        f"{plural(len(shards), 'shard')}: not one sample of {sequence} + 1",
        "prepare more text, or use a smaller model.sequence",
    )


class TokenDataset(Renewed):
    """Samples of consecutive tokens, read from the shards by file offset.

    A sample has `sequence` tokens, and as targets the token that follows each of them. Samples
    overlap only in the last target, and do not cross shards. Several threads may call `fetch`; one
    at a time is served.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train" or "validation".
        sequence: tokens per sample, T.
        cache: the cache of the shards' blocks on this node; None: there is none.
        damaged: what `fetch` does about a sample that is damaged or cannot be read: raise an error,
            or substitute another one (see `Substitutes`).

    Raises:
        DataError: the split has no whole sample.
        ConfigError: `damaged` is neither "raise" nor "substitute".

    The attribute `samples_per_block` says how many neighbours are worth reading one after another,
    and `samples_ahead` how many samples in advance `ahead` is to be called. `identity` is the same
    for the same samples, also in a copy of the folder.
    """

    draws_random_numbers: ClassVar[bool] = False  # see `Reader.may_draw`
    fresh = ("_fetching", "_memory", "_stored", "_places", "_given", "_ahead")

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        split: str,
        sequence: int,
        cache: BlockCache | None = None,
        damaged: Literal["raise", "substitute"] = "raise",
    ) -> None:
        self.files = ShardFiles(directory, manifest, split, cache)
        self.sequence = sequence
        self.identity = f"{manifest.digest} {split} {sequence}"
        itemsize = self.files.dtype.itemsize
        self.stride = sequence * itemsize  # bytes from a sample to the next one
        self.nbytes = self.stride + itemsize  # of a sample
        # A batch's samples are read to aligned places: the system copies to others half as fast.
        self.apart = -(-self.nbytes // ALIGNED) * ALIGNED  # bytes from a place to the next one
        self.samples_per_block = max(1, TOGETHER_BYTES // self.stride)
        self.samples_ahead = max(1, AHEAD_BYTES // (-(-self.nbytes // HASHED_BYTES) * HASHED_BYTES))
        counts = np.array([(shard.tokens - 1) // sequence for shard in self.files.shards], np.int64)
        self.ends = counts.cumsum()
        self.skipped = (self.ends - counts) * self.stride  # bytes of the samples in earlier shards
        self._renew()
        check_one_sample(directory, manifest, split, sequence)
        if damaged not in ("raise", "substitute"):
            raise ConfigError(f"damaged is {damaged!r}", "give raise or substitute")
        self.substitutes = Substitutes(len(self)) if damaged == "substitute" else None

    @classmethod
    def open(
        cls,
        directory: str | Path,
        split: str = "train",
        *,
        sequence: int,
        damaged: Literal["raise", "substitute"] = "raise",
    ) -> TokenDataset:
        """The data set of a folder that `hpc-train prepare text` or `tokens` has made.

        Any rank may call it. A batch is a pair of int64 tensors of shape (samples, T): tokens, and
        the token that follows each of them.

        Args:
            directory: the data folder.
            split: "train" or "validation".
            sequence: tokens per sample, T.
            damaged: "raise" ends at a damaged sample, "substitute" takes another one.

        Raises:
            DataError: the folder is none of tokens, or the split has no whole sample.
            ConfigError: `damaged` is neither "raise" nor "substitute".
        """
        folder = Path(directory).expanduser()
        return cls(folder, read_manifest(folder), split, sequence, damaged=damaged)

    def _renew(self) -> None:
        self._fetching = threading.Lock()
        self._memory = np.empty(0, np.uint8)  # the places for samples of a batch
        self._stored = np.empty((0, self.sequence + 1), self.files.dtype)  # the same, as tokens
        self._places: list[list[memoryview]] = []
        self._given: list[_Memory] = []  # memory of batches that were given away
        self._ahead: Ahead | None = None

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def fetch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Read samples.

        Returns:
            Tokens and targets, int64 of shape (len(indices), T) each. If some samples stand in for
            damaged ones, the tuple is a `Substituted`.

        Raises:
            DataError: a shard cannot be read, ends early or is damaged, or a token is not in the
                vocabulary; with "substitute": no sound sample was found.
            HpcTrainError: the system has no memory, or opens no more files.
        """
        wanted = np.asarray(indices, np.int64)
        if self.substitutes is None:
            return self._read(wanted)
        return self.substitutes.fetch(wanted, self._read)

    def _read(self, wanted: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read samples, int64 (N,), and raise an error if one is damaged."""
        order = None
        if self.files.are_slow and (wanted[1:] < wanted[:-1]).any():
            # In the order of the files a disk's head and read-ahead have the least to do.
            order = wanted.argsort(kind="stable")
            wanted = wanted[order]
        apart = wanted[1:] - wanted[:-1] != 1  # from the sample before
        lasts = apart.nonzero()[0]
        if order is None and not len(lasts) and len(wanted):
            number, begin = self._places_of(wanted[:1])
            if wanted[-1] < self.ends[number[0]]:
                return self._read_run(int(number[0]), int(begin[0]), len(wanted))
        numbers, begins = self._places_of(wanted)
        with self._fetching:
            self._reserve(len(wanted))
            memory = self._new(len(wanted))
            if len(lasts) < len(apart):
                # The first sample of a shard is no neighbour of the last one of the shard before.
                lasts = (apart | (begins[1:] == 0)).nonzero()[0]
                self._read_runs(numbers, begins, lasts.tolist(), memory, order)
            else:
                places = self._places[: len(wanted)]
                if order is not None:
                    places = [self._places[place] for place in order.tolist()]
                self.files.read(numbers, begins, self.nbytes, places)
                stored = self._stored[: len(wanted)]
                memory.fill(slice(None), stored[:, :-1], stored[:, 1:])
            return memory.tensors()

    def ahead(self, indices: Sequence[int] | np.ndarray) -> None:
        """Bring samples that will be fetched later to the cache, if there is one.

        It returns at once, and never fails.
        """
        if self.files.cache is None:
            return
        if self._ahead is None:
            self._ahead = Ahead(self.files, self.nbytes)
        self._ahead.ask(*self._places_of(np.sort(np.asarray(indices, np.int64))))

    def _places_of(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard and the first byte of each sample."""
        numbers = self.ends.searchsorted(wanted, "right")
        return numbers, wanted * self.stride - self.skipped[numbers]

    def _read_run(self, number: int, begin: int, count: int) -> tuple[Tensor, Tensor]:
        """Read neighbours of one shard, and nothing else."""
        with self._fetching:
            self._reserve(count)
            stored = self._memory[: count * self.stride + self.files.dtype.itemsize]
            self.files.read_one(number, begin, stored.data)
            memory = self._new(count)
            memory.fill(slice(None), *self._of_run(stored))
            return memory.tensors()

    def _read_runs(
        self,
        numbers: np.ndarray,
        begins: np.ndarray,
        lasts: list[int],
        memory: _Memory,
        order: np.ndarray | None,
    ) -> None:
        """Read runs of neighbours, which share a token. `lasts` has the end of all but the last."""
        firsts = [0, *(last + 1 for last in lasts)]
        counts = [end - first for first, end in pairwise([*firsts, len(numbers)])]
        sizes = [count * self.stride + self.files.dtype.itemsize for count in counts]
        at = [first * self.apart for first in firsts]
        runs = [self._memory[place : place + size] for place, size in zip(at, sizes, strict=True)]
        memories = [[run.data] for run in runs]
        self.files.read(numbers[firsts], begins[firsts], np.array(sizes), memories)
        for run, first, count in zip(runs, firsts, counts, strict=True):
            places = slice(first, first + count) if order is None else order[first : first + count]
            memory.fill(places, *self._of_run(run))

    def _of_run(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The inputs and the targets of neighbours, of the bytes that were read for them."""
        tokens = stored.view(self.files.dtype)
        return tokens[:-1].reshape(-1, self.sequence), tokens[1:].reshape(-1, self.sequence)

    def _reserve(self, samples: int) -> None:
        """Have places for some samples."""
        if samples > len(self._places) or not self._places:
            samples = max(samples, 1)
            memory = np.empty(samples * self.apart + ALIGNED, np.uint8)
            begin = -memory.ctypes.data % ALIGNED
            self._memory = memory[begin : begin + samples * self.apart]
            rows = self._memory.reshape(samples, -1)[:, : self.nbytes]
            self._stored = rows.view(self.files.dtype)
            self._places = [[row.data] for row in rows]

    def _new(self, count: int) -> _Memory:
        """Memory for a batch: that of an earlier one, if nothing refers to it.

        The system has to clear new memory, which takes longer than filling it.

        Args:
            count: number of samples.
        """
        for memory in self._given:
            if len(memory.parts[0]) == count and memory.is_free():
                return memory
        parts = [np.empty((count, self.sequence), np.int64) for _ in range(2)]
        self._given = [*self._given[1 - MOST_KEPT :], _Memory(parts)]
        return self._given[-1]

    def close(self) -> None:
        """Close the shards."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self.files.close()
