"""Samples of tokens, read from the shards of a data folder.

Each block is verified when this process first needs it, and whenever its file has changed since.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from hpc_train import files
from hpc_train.data.blocks import damaged_block, ends_early, read_table
from hpc_train.data.manifest import HASHED_BYTES, PREPARE_AGAIN, Manifest
from hpc_train.errors import DataError

SHARD_READERS = 8  # most threads that read together where the storage is slow
SLOW_SECONDS = 2e-4  # seconds per read from which on threads pay: a disk's, not the page cache's
Identity = tuple[int, int, int, int]


def most_open_files() -> int:
    """Number of shards that a process keeps open: a quarter of the files that it may open."""
    return max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


@dataclass
class _Open:
    """An open shard, and the hashes of its blocks."""

    path: Path
    descriptor: int
    identity: Identity
    table: np.ndarray


class TokenDataset:
    """Samples of consecutive tokens, read from the shards by file offset.

    A sample has `sequence` tokens, and as targets the token that follows each of them. Samples
    overlap only in the last target, and do not cross shards. Several threads may call `fetch`; one
    at a time is served, and reads with several threads where the storage is slow.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train" or "validation".
        sequence: tokens per sample, T.

    Raises:
        DataError: the split has no whole sample.

    The attribute `samples_per_block` says how many samples one verified block holds.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str, sequence: int) -> None:
        self.directory = directory
        self.shards = manifest.splits.get(split, ())
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.vocab = manifest.vocab
        self.sequence = sequence
        self.samples_per_block = max(1, HASHED_BYTES // (sequence * self.dtype.itemsize))
        counts = [(shard.tokens - 1) // sequence for shard in self.shards]
        self.ends = np.cumsum(counts, dtype=np.int64)
        blocks = [-(-shard.nbytes(manifest.dtype) // HASHED_BYTES) for shard in self.shards]
        self.first_blocks = np.cumsum([0, *blocks], dtype=np.int64)  # of the shards, in all of them
        self.offsets = np.array([shard.offset for shard in self.shards], np.int64)
        self._renew()
        if len(self) == 0:
            raise DataError(
                f"split {split} of {directory} has {manifest.tokens(split)} tokens in "
                f"{len(self.shards)} shards: not one sample of {sequence} + 1",
                "prepare more text, or use a smaller model.sequence",
            )

    def _renew(self) -> None:
        self._files: OrderedDict[int, _Open] = OrderedDict()
        self._verified = np.zeros(self.first_blocks[-1], bool)
        self._seen: dict[int, Identity] = {}  # the files whose blocks were verified
        self._reading = threading.Lock()  # opening a shard may close one that is being read
        self._seconds = 0.0  # seconds that a thread took for a read last time

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy in a worker, which opens the shards itself."""
        fresh = ("_files", "_verified", "_seen", "_reading")
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
        wanted = np.asarray(indices, np.int64)
        rows = np.empty((len(wanted), self.sequence + 1), self.dtype)
        # In the order of the files, so that a disk's head and read-ahead have the least to do.
        order = np.argsort(wanted, kind="stable")
        wanted = wanted[order]
        numbers = np.searchsorted(self.ends, wanted, side="right")
        before = np.where(numbers > 0, self.ends[numbers - 1], 0)
        begins = (wanted - before) * (self.sequence * self.dtype.itemsize)  # bytes in the tokens
        with self._reading:
            most = most_open_files()
            for first in range(0, len(wanted), most):
                part = slice(first, first + most)
                self._fetch(numbers[part], begins[part], rows, order[part])
                self._keep_open(most)
        if rows.size and (largest := int(rows.max())) >= self.vocab:
            raise DataError(
                f"token {largest} in {self.directory} is beyond its manifest's vocabulary of "
                f"{self.vocab}",
                PREPARE_AGAIN,
            )
        wide = torch.from_numpy(rows.astype(np.int64))
        return wide[:, :-1], wide[:, 1:]

    def _fetch(
        self, numbers: np.ndarray, begins: np.ndarray, rows: np.ndarray, order: np.ndarray
    ) -> None:
        """Read rows, each from a shard and from a byte of its tokens on, into places of `rows`."""
        shards = {number: self._open(number) for number in dict.fromkeys(numbers.tolist())}
        of_shard = self.first_blocks[numbers]
        first = of_shard + begins // HASHED_BYTES
        last = of_shard + (begins + (rows.itemsize * rows.shape[1] - 1)) // HASHED_BYTES
        known = self._verified[first] & self._verified[last]
        if not known.all() or self.samples_per_block == 1:  # a row may have blocks in between
            self._verify(shards, first, last)
        self._read(shards, numbers, self.offsets[numbers] + begins, rows, order)

    def _read(
        self,
        shards: dict[int, _Open],
        numbers: np.ndarray,
        begins: np.ndarray,
        rows: np.ndarray,
        order: np.ndarray,
    ) -> None:
        """Read rows, each from a shard and from a byte of its file on, into places of `rows`."""
        width, nbytes = rows.itemsize, rows.itemsize * rows.shape[1]
        # Neighbours, which share a token, are one read.
        apart = (np.diff(begins) != nbytes - width) | (np.diff(numbers) != 0)
        runs = np.concatenate([[0], np.flatnonzero(apart) + 1, [len(order)]])
        firsts, counts = runs[:-1], np.diff(runs).tolist()
        of, at = [shards[number] for number in numbers[firsts].tolist()], begins[firsts].tolist()
        places, starts = (order[firsts] * nbytes).tolist(), firsts.tolist()
        memory = rows.reshape(-1).view(np.uint8).data

        def read(run: int) -> None:
            count, place = counts[run], places[run]
            if count == 1:
                _fill(of[run], memory[place : place + nbytes], at[run])
                return
            tokens = np.empty(count * (rows.shape[1] - 1) + 1, self.dtype)
            _fill(of[run], tokens.view(np.uint8).data, at[run])
            neighbours = np.lib.stride_tricks.as_strided(
                tokens, (count, rows.shape[1]), (nbytes - width, width)
            )
            rows[order[starts[run] : starts[run] + count]] = neighbours

        self._each(read, range(len(counts)))

    def _verify(
        self, shards: dict[int, _Open], first_block: np.ndarray, last_block: np.ndarray
    ) -> None:
        """Verify the blocks that rows need, and that were not verified yet."""
        if self.samples_per_block == 1:
            pairs = zip(first_block, last_block, strict=True)
            needed = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in pairs]))
        else:
            needed = np.unique(np.concatenate([first_block, last_block]))
        fresh = needed[~self._verified[needed]]
        owners = (np.searchsorted(self.first_blocks, fresh, side="right") - 1).tolist()

        def verify(place: int) -> None:
            number = owners[place]
            of, shard = self.shards[number], shards[number]
            block = int(fresh[place] - self.first_blocks[number])
            begin, end = block * HASHED_BYTES, of.nbytes(str(self.dtype))
            memory = memoryview(bytearray(min(HASHED_BYTES, end - begin)))
            try:
                for again in (False, True):
                    count = files.read_into(shard.descriptor, memory, of.offset + begin)
                    if count < len(memory):
                        raise ends_early(shard.path)
                    if xxhash.xxh3_64_intdigest(memory) == shard.table[block]:
                        break
                    if again:
                        raise damaged_block(shard.path, "tokens", block)
                    # The copy in memory may be what is wrong, so the disk is to be read again.
                    drop = os.POSIX_FADV_DONTNEED
                    os.posix_fadvise(shard.descriptor, of.offset + begin, len(memory), drop)
            except OSError as error:
                raise _unreadable(shard.path, error) from None

        self._each(verify, range(len(fresh)))
        self._verified[fresh] = True

    def _each(self, read: Callable[[int], None], items: range) -> None:
        """Call a function that reads, for each item; in threads where the last calls took long."""
        if not items:
            return
        begin = time.perf_counter()
        at_once = min(SHARD_READERS, len(items)) if self._seconds > SLOW_SECONDS else 1
        left, errors = iter(items), list[BaseException]()

        def read_some() -> None:
            try:
                for item in left:  # each item goes to one thread: a range's iterator is atomic
                    read(item)
            except BaseException as error:  # noqa: BLE001  # raised below, in the caller's thread
                errors.append(error)

        # Daemons, because a read that never returns must not keep the program from its end.
        others = [threading.Thread(target=read_some, daemon=True) for _ in range(at_once - 1)]
        for thread in others:
            thread.start()
        read_some()
        for thread in others:
            thread.join()
        if errors:
            raise errors[0]
        self._seconds = (time.perf_counter() - begin) * at_once / len(items)

    def _open(self, number: int) -> _Open:
        """The open shard, with nothing verified if its file has changed."""
        if number in self._files:
            self._files.move_to_end(number)
            shard = self._files[number]
            if _identity(shard.descriptor) == shard.identity:
                return shard
            self._close(number)
        path = self.directory / self.shards[number].name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                identity = _identity(descriptor)
                table = read_table(descriptor, path, self.shards[number], str(self.dtype))
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise _unreadable(path, error) from None
        if self._seen.setdefault(number, identity) != identity:
            self._seen[number] = identity
            self._verified[slice(*self.first_blocks[number : number + 2])] = False
        self._files[number] = _Open(path, descriptor, identity, table)
        return self._files[number]

    def _keep_open(self, most: int) -> None:
        while len(self._files) > most:
            self._close(next(iter(self._files)))

    def _close(self, number: int) -> None:
        os.close(self._files.pop(number).descriptor)

    def close(self) -> None:
        """Close the shards."""
        with self._reading:
            self._keep_open(0)


def _identity(descriptor: int) -> Identity:
    """What tells a file from another one, and from itself after a change."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _fill(shard: _Open, memory: memoryview, begin: int) -> None:
    """Fill memory with the bytes of a shard's file from a place on."""
    try:
        count = files.call("read", os.preadv, shard.descriptor, [memory], begin)
        if count < len(memory):
            count += files.read_into(shard.descriptor, memory[count:], begin + count)
    except OSError as error:
        raise _unreadable(shard.path, error) from None
    if count < len(memory):
        raise ends_early(shard.path)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"shard {path}: {error.strerror}", "check the file system")
