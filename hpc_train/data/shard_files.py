"""Reads bytes of shards, and verifies each block when this process first needs it."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpc_train import files
from hpc_train.data.blocks import beyond_vocabulary, damaged_block, ends_early, read_table
from hpc_train.data.check import close_shard, open_shard, unreadable_shard
from hpc_train.data.manifest import HASHED_BYTES, Manifest

SHARD_READERS = 8  # most threads that read together where the storage is slow
SLOW_SECONDS = 3e-5  # seconds per read from which on threads pay: a disk's, not the page cache's
CHECKED_SECONDS = 0.01  # seconds after which a file is looked at again, as it may have changed
VERIFIED_TOGETHER = 16  # most blocks in one read
BLOCK_BITS = HASHED_BYTES.bit_length() - 1
Identity = tuple[int, int, int, int]


def most_open_files() -> int:
    """Number of shards that a process keeps open: a quarter of the files that it may open."""
    return max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


@dataclass
class _Open:
    """An open shard, and the hashes of its blocks."""

    path: Path
    descriptors: dict[str, int]  # by dataset
    identity: Identity
    table: np.ndarray


class ShardFiles:
    """The shards of a split.

    Several threads may call `read`. One at a time is served, and reads with several threads where
    the storage is slow. A file that changes is verified again, but what is read within
    CHECKED_SECONDS of the change may still be taken for verified.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train" or "validation".

    The attribute `shards` has the shards of the split, in the manifest's order.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str) -> None:
        self.directory = directory
        self.shards = manifest.splits.get(split, ())
        self.dtype, self.vocab = np.dtype(manifest.dtype).newbyteorder("<"), manifest.vocab
        extents = [shard.extents(manifest.dtype) for shard in self.shards]
        names = ("tokens", "documents")
        sizes = np.array([[one[name][1] for name in names] for one in extents], np.int64)
        blocks = -(-sizes.reshape(-1, 2) // HASHED_BYTES)
        # Blocks are counted through all shards. In each shard those of documents come second.
        self._ends = blocks.sum(1).cumsum()
        of_shards = self._ends - blocks.sum(1)
        self._first_block = {"tokens": of_shards, "documents": of_shards + blocks[:, 0]}
        self._offset = {
            name: np.array([one[name][0] for one in extents], np.int64) for name in names
        }
        self._renew()

    def _renew(self) -> None:
        self._files: dict[int, _Open] = {}  # those opened first come first
        self._verified = np.zeros(self._ends[-1] if len(self._ends) else 0, bool)
        self._seen: dict[int, Identity] = {}  # the files whose blocks were verified
        self._checked: dict[int, _Open] = {}  # the shards that were looked at since `_since`
        self._since = 0.0
        self._reading = threading.Lock()  # opening a shard may close one that is being read
        self._seconds = {"read": 0.0, "verify": 0.0}  # seconds that each took last time
        self._most = most_open_files()

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy in a worker, which opens the shards itself."""
        fresh = ("_files", "_verified", "_seen", "_checked", "_reading")
        return {key: value for key, value in vars(self).items() if key not in fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._renew()

    def read(
        self,
        numbers: np.ndarray,
        begins: np.ndarray,
        nbytes: int | np.ndarray,
        memories: Sequence[list[memoryview]],
        dataset: str = "tokens",
    ) -> None:
        """Fill memories with bytes that were verified.

        Args:
            numbers: the shard of each read, int64 (N,). It is fastest if they rise.
            begins: the first byte of each read in the dataset, int64 (N,).
            nbytes: the number of bytes of each read, at least 1: one for all, or int64 (N,).
            memories: N lists, each with one memory of as many bytes.
            dataset: "tokens" or "documents".

        Raises:
            DataError: a shard cannot be read, ends early or is damaged, or a token is not in the
                vocabulary.
        """
        with self._reading:
            for first in range(0, len(numbers), self._most):
                part = slice(first, first + self._most)
                sizes = nbytes if isinstance(nbytes, int) else nbytes[part]
                self._read(numbers[part], begins[part], sizes, memories[part], dataset)
                self._keep_open(self._most)

    def _read(
        self,
        numbers: np.ndarray,
        begins: np.ndarray,
        nbytes: int | np.ndarray,
        memories: Sequence[list[memoryview]],
        dataset: str,
    ) -> None:
        listed = numbers.tolist()
        if (now := time.monotonic()) > self._since + CHECKED_SECONDS:
            self._checked, self._since = {}, now
        checked = self._checked
        shards = {number: checked.get(number) or self._open(number) for number in {*listed}}
        of_shard = self._first_block[dataset][numbers]
        first = of_shard + (begins >> BLOCK_BITS)
        last = of_shard + ((begins + (nbytes - 1)) >> BLOCK_BITS)
        sizes = [nbytes] * len(listed) if isinstance(nbytes, int) else nbytes.tolist()
        if max(sizes) > HASHED_BYTES:  # there may be blocks between the first and the last
            pairs = zip(first.tolist(), (last + 1).tolist(), strict=True)
            if long := [
                np.arange(*pair) for pair in pairs if not self._verified[slice(*pair)].all()
            ]:
                self._verify(shards, np.concatenate(long))
        elif not (self._verified[first] & self._verified[last]).all():
            self._verify(shards, np.concatenate([first, last]))
        places = (begins + self._offset[dataset][numbers]).tolist()
        if self._seconds["read"] <= SLOW_SECONDS:
            descriptors = {number: one.descriptors[dataset] for number, one in shards.items()}
            # A loop in C, because one in Python takes as long as reading a sample from memory.
            begin, of_reads = time.perf_counter(), map(descriptors.__getitem__, listed)
            try:
                counts = list(map(os.preadv, of_reads, memories, places))
            except OSError:
                counts = []  # the next call says which file it is
            self._seconds["read"] = (time.perf_counter() - begin) / len(listed)
            if counts == sizes:
                return

        def fill(item: int) -> None:
            _fill(shards[listed[item]], dataset, memories[item][0], places[item])

        self._each("read", fill, len(listed))

    def _verify(self, shards: dict[int, _Open], needed: np.ndarray) -> None:
        """Verify those of some blocks that were not verified yet."""
        fresh = np.unique(needed[~self._verified[needed]])
        if not fresh.size:
            return
        owners = self._ends.searchsorted(fresh, "right")
        # Neighbours are one read. A shard's tokens and documents have different places in the file.
        apart = (np.diff(fresh) > 1) | (np.diff(owners) > 0)
        apart |= np.isin(fresh[1:], self._first_block["documents"])
        groups = [
            group[first : first + VERIFIED_TOGETHER].tolist()
            for group in np.split(fresh, np.flatnonzero(apart) + 1)
            for first in range(0, len(group), VERIFIED_TOGETHER)
        ]

        def verify(item: int) -> None:
            blocks = groups[item]
            number = int(self._ends.searchsorted(blocks[0], "right"))
            self._verify_group(shards[number], number, blocks)

        self._each("verify", verify, len(groups))
        self._verified[fresh] = True

    def _verify_group(self, shard: _Open, number: int, blocks: list[int]) -> None:
        """Read and verify neighbouring blocks of one dataset of a shard."""
        of, begin = self.shards[number], int(self._first_block["tokens"][number])
        documents = int(self._first_block["documents"][number])
        dataset = "tokens" if blocks[0] < documents else "documents"
        offset, nbytes = of.extents(str(self.dtype))[dataset]
        first = blocks[0] - int(self._first_block[dataset][number])
        offset, nbytes = offset + first * HASHED_BYTES, nbytes - first * HASHED_BYTES
        array = np.empty(min(len(blocks) * HASHED_BYTES, nbytes), np.uint8)
        memory = array.data
        _fill(shard, dataset, memory, offset)
        for place, block in enumerate(blocks):
            part = slice(place * HASHED_BYTES, (place + 1) * HASHED_BYTES)
            wanted = int(shard.table[block - begin])
            if xxhash.xxh3_64_intdigest(memory[part]) == wanted:
                continue
            # The copy in memory may be what is wrong, so the disk is to be read again.
            at = offset + part.start
            descriptor, size = shard.descriptors[dataset], len(memory[part])
            os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_DONTNEED)
            _fill(shard, dataset, memory[part], at)
            if xxhash.xxh3_64_intdigest(memory[part]) != wanted:
                raise damaged_block(shard.path, of, dataset, first + place)
        if dataset == "tokens" and (tokens := array.view(self.dtype)).max() >= self.vocab:
            place = int(tokens.argmax())
            block = first + place * self.dtype.itemsize // HASHED_BYTES
            raise beyond_vocabulary(shard.path, block, int(tokens[place]), self.vocab)

    def _each(self, what: str, read: Callable[[int], None], count: int) -> None:
        """Call a function that reads, for 0 to count - 1; in threads where that takes long."""
        at_once = min(SHARD_READERS, count) if self._seconds[what] > SLOW_SECONDS else 1
        left, errors = iter(range(count)), list[BaseException]()

        def read_some() -> int:
            done = 0
            try:
                for item in left:  # each item goes to one thread: a range's iterator is atomic
                    read(item)
                    done += 1
            except BaseException as error:  # noqa: BLE001  # raised below, in the caller's thread
                errors.append(error)
            return done

        # Daemons, because a read that never returns must not keep the program from its end.
        others = [threading.Thread(target=read_some, daemon=True) for _ in range(at_once - 1)]
        for thread in others:
            thread.start()
        begin = time.perf_counter()
        done = read_some()
        # Only this thread's reads count: starting threads takes longer than reading from memory.
        self._seconds[what] = (time.perf_counter() - begin) / max(1, done)
        for thread in others:
            thread.join()
        if errors:
            raise errors[0]

    def _open(self, number: int) -> _Open:
        """The open shard, with nothing verified if its file has changed."""
        shard = self._files.get(number)
        if shard is not None:
            found = os.fstat(shard.descriptors["tokens"])  # of an open file only these can change
            if (found.st_size, found.st_mtime_ns) != shard.identity[2:]:
                self._close(number)
                shard = None
        if shard is None:
            shard = self._files[number] = self._opened(number)
        self._checked[number] = shard
        return shard

    def _opened(self, number: int) -> _Open:
        of = self.shards[number]
        path = self.directory / of.name
        descriptors = open_shard(path, of, str(self.dtype))
        try:
            identity = _identity(descriptors["tokens"])
            table = read_table(descriptors["hashes"], path, of, str(self.dtype))
        except OSError as error:
            close_shard(descriptors)
            raise unreadable_shard(path, error) from None
        except BaseException:
            close_shard(descriptors)
            raise
        if self._seen.setdefault(number, identity) != identity:
            self._seen[number] = identity
            begin = int(self._first_block["tokens"][number])
            self._verified[begin : self._ends[number]] = False
        return _Open(path, descriptors, identity, table)

    def _keep_open(self, most: int) -> None:
        while len(self._files) > most:
            self._close(next(iter(self._files)))

    def _close(self, number: int) -> None:
        self._checked.pop(number, None)
        close_shard(self._files.pop(number).descriptors)

    def close(self) -> None:
        """Close the shards."""
        with self._reading:
            self._keep_open(0)


def _identity(descriptor: int) -> Identity:
    """What tells a file from another one, and from itself after a change."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _fill(shard: _Open, dataset: str, memory: memoryview, begin: int) -> None:
    """Fill memory with the bytes of a shard's dataset from a place in its file on."""
    try:
        count = files.read_into(shard.descriptors[dataset], memory, begin)
    except OSError as error:
        raise unreadable_shard(shard.path, error) from None
    if count < len(memory):
        raise ends_early(shard.path)
