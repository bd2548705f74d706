"""Reads bytes of shards, and verifies each block when this process first needs it.

With a cache, blocks are taken from the shards' copies in it, and verified there.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic

import numpy as np
import xxhash

from hpc_train.data.block_cache import BlockCache
from hpc_train.data.blocks import beyond_vocabulary, block_hashes, damaged_block
from hpc_train.data.check import S
from hpc_train.data.manifest import HASHED_BYTES, StoredData
from hpc_train.data.opened_shard import Identity, OpenedShard, why_unread
from hpc_train.data.read_threads import ReadThreads

SHARD_READERS = 8  # most threads that read together where the storage is slow
SLOW_BLOCK = 4  # a block takes so many times as long as a sample in memory, to read and verify
CHECKED_SECONDS = 0.01  # seconds after which a file is looked at again, as it may have changed
VERIFIED_TOGETHER = 16  # most blocks in one read
BLOCK_BITS = HASHED_BYTES.bit_length() - 1
SOURCE, COPY = 1, 2  # bits that say where a block was verified: in the shard, in its copy
UNDER_WAY, TAKEN = 1, 2  # a block is being brought to the cache ahead of need; it need not be
MOST_WAIT = 1.0  # seconds to wait for a block that is under way
BLOCK_POLL_SECONDS = 3e-5  # seconds between two looks at it


def most_open_files() -> int:
    """Number of shards that a process keeps open: a quarter of the files that it may open."""
    return max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


class Renewed:
    """An object whose copy in a worker makes some attributes anew: `_renew` makes the `fresh`."""

    fresh: ClassVar[tuple[str, ...]]

    def _renew(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy in a worker."""
        return {key: value for key, value in vars(self).items() if key not in self.fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._renew()


class ShardFiles(Renewed, Generic[S]):
    """The shards of a split.

    Several threads may call `read`. One at a time is served, and reads with several threads where
    the storage is slow. A file that changes is verified again, but what is read within
    CHECKED_SECONDS of the change may still be taken for verified.

    Args:
        directory: the data folder.
        manifest: its manifest.
        split: "train" or "validation".
        cache: the cache of its blocks on this node; None: there is none.

    The attribute `shards` has the shards of the split, in the manifest's order, and `names` has the
    names of their datasets. `verified` has the bits SOURCE and COPY of each block, uint8. `asked`
    says which are UNDER_WAY or TAKEN.
    """

    readers = SHARD_READERS  # most threads that read together
    fresh = ("_files", "_descriptors", "verified", "asked", "_seen", "_checked", "_reading")

    def __init__(
        self, directory: Path, manifest: StoredData[S], split: str, cache: BlockCache | None = None
    ) -> None:
        self.directory, self.cache = directory, cache
        self.shards: tuple[S, ...] = manifest.splits.get(split, ())
        self.dtype, self.limit = np.dtype(manifest.dtype).newbyteorder("<"), manifest.limit
        extents = [shard.extents(manifest.dtype) for shard in self.shards]
        self.names = [name for name in (extents[0] if extents else ()) if name != "hashes"]
        sizes = np.array([[one[name][1] for name in self.names] for one in extents], np.int64)
        blocks = -(-sizes.reshape(len(extents), len(self.names)) // HASHED_BYTES)
        # Blocks are counted through all shards, and in each of them through its datasets.
        self._ends = blocks.sum(1).cumsum()
        first = (self._ends - blocks.sum(1))[:, None] + blocks.cumsum(1) - blocks
        self._first_block = dict(zip(self.names, first.T, strict=True))
        self._first_byte = {
            name: blocks << BLOCK_BITS for name, blocks in self._first_block.items()
        }
        self._offset = {
            name: np.array([one[name][0] for one in extents], np.int64) for name in self.names
        }
        self._renew()

    def _renew(self) -> None:
        self._files: dict[int, OpenedShard] = {}  # those opened first come first
        # For each dataset the descriptors of these shards, and under ~number those of their copies.
        self._descriptors: dict[str, dict[int, int]] = {name: {} for name in self.names}
        self.verified = np.zeros(self._ends[-1] if len(self._ends) else 0, np.uint8)
        self.asked = np.zeros_like(self.verified)  # UNDER_WAY or TAKEN
        self._seen: dict[int, Identity] = {}  # the files whose blocks were verified
        self._checked: set[int] = set()  # the shards that were looked at since `_since`
        self._since = 0.0
        self._reading = threading.Lock()  # opening a shard may close one that is being read
        self._reads, self._blocks = ReadThreads(self.readers), ReadThreads(self.readers, SLOW_BLOCK)
        self._last_seconds = 0.0  # that a read without threads took
        self._most = most_open_files() // (1 if self.cache is None else 2)

    @property
    def are_slow(self) -> bool:
        """Whether the last reads took longer than reads from memory."""
        return self._reads.are_slow

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
            dataset: the dataset to read from.

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

    def read_one(self, number: int, begin: int, memory: memoryview) -> None:
        """Read tokens as `read` does, but make no arrays: they would cost as much as the read.

        Args:
            number: the shard.
            begin: the first byte in the dataset.
            memory: is filled; it has at least one byte.

        Raises:
            DataError: as `read` raises it.
        """
        with self._reading:
            self._open_all((number,))
            first = begin + int(self._first_byte["tokens"][number])
            last = first + len(memory) - 1
            blocks = self.verified[first >> BLOCK_BITS : (last >> BLOCK_BITS) + 1]
            where = int(np.bitwise_and.reduce(blocks))
            key = ~number if where & COPY else number
            place = begin + int(self._offset["tokens"][number])
            counts = self._counts("tokens", [key], [place], [[memory]]) if where else []
            if counts != [len(memory)]:
                arrays = np.array([number]), np.array([begin])
                self._read(*arrays, len(memory), [[memory]], "tokens")
            self._keep_open(self._most)

    def _read(
        self,
        numbers: np.ndarray,
        begins: np.ndarray,
        nbytes: int | np.ndarray,
        memories: Sequence[list[memoryview]],
        dataset: str,
    ) -> None:
        keys = numbers.tolist()
        self._open_all(keys)
        sizes = [nbytes] * len(keys) if isinstance(nbytes, int) else nbytes.tolist()
        first, last = self._blocks_of(numbers, begins, nbytes, dataset)
        verified = self._where(first, last, sizes)
        if np.count_nonzero(verified) < len(keys):
            verified = self._verified_reads(first, last, sizes)
        if self.cache is not None:
            keys = np.where(verified & COPY, ~numbers, numbers).tolist()
        places = (begins + self._offset[dataset][numbers]).tolist()
        if not self.are_slow:
            begin = time.perf_counter()
            counts = self._counts(dataset, keys, places, memories)
            seconds = (time.perf_counter() - begin) / len(keys)
            # Reads that are slow only once were interrupted by another program.
            self._reads.seconds, self._last_seconds = min(seconds, self._last_seconds), seconds
            if counts == sizes:
                return
        lost = list[OSError]()

        def fill(item: int) -> None:
            key, memory = keys[item], memories[item][0]
            if key >= 0:
                self._files[key].fill(dataset, memory, places[item])
            elif error := why_unread(self._descriptors[dataset][key], memory, places[item]):
                lost.append(error)

        self._reads.each(fill, len(keys))
        if lost:
            self._leave_cache(lost[0])
            self._read(numbers, begins, nbytes, memories, dataset)

    def _counts(
        self,
        dataset: str,
        keys: list[int],
        places: list[int],
        memories: Sequence[list[memoryview]],
    ) -> list[int]:
        """Fill memories. Returns the bytes of each read; an empty list if a read fails."""
        descriptors = map(self._descriptors[dataset].__getitem__, keys)
        try:
            # A loop in C, because one in Python takes as long as reading a sample from memory.
            return [*map(os.preadv, descriptors, memories, places)]
        except OSError:
            return []  # the caller's next call says which file it is

    def _open_all(self, numbers: Iterable[int]) -> None:
        """Open shards, and look at times whether those that are open have changed."""
        if (now := time.monotonic()) > self._since + CHECKED_SECONDS:
            self._checked.clear()
            self._since = now
        for number in {*numbers} - self._checked:
            self._open(number)

    def _blocks_of(
        self, numbers: np.ndarray, begins: np.ndarray, nbytes: int | np.ndarray, dataset: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last block of each read."""
        starts = begins + self._first_byte[dataset][numbers]
        return starts >> BLOCK_BITS, (starts + (nbytes - 1)) >> BLOCK_BITS

    def _verified_reads(self, first: np.ndarray, last: np.ndarray, sizes: list[int]) -> np.ndarray:
        """Verify the blocks of reads. Returns where all blocks of each read are verified, uint8."""
        verified = self._where(first, last, sizes)
        # A read is from one file. So blocks that only the copy has are needed from the shard, too,
        # where their neighbours are not in the copy.
        for wanted in (SOURCE | COPY, SOURCE):
            if verified.all():
                break
            blocks = every_block(first, last, verified == 0)
            self._verify(blocks[self.verified[blocks] & wanted == 0], wanted)
            verified = self._where(first, last, sizes)
        return verified

    def _where(self, first: np.ndarray, last: np.ndarray, sizes: list[int]) -> np.ndarray:
        if max(sizes) <= HASHED_BYTES:
            both: np.ndarray = self.verified[first] & self.verified[last]
            return both
        # There may be blocks between the first and the last.
        pairs = zip(first.tolist(), (last + 1).tolist(), strict=True)
        return np.array([np.bitwise_and.reduce(self.verified[slice(*pair)]) for pair in pairs])

    def _verify(self, fresh: np.ndarray, where: int) -> None:
        """Verify blocks, int64 (N,) and rising, in one of the places that the bits allow."""
        if where & COPY and self.cache is not None:
            fresh = self._without_copies(fresh)
            under_way = self.asked[fresh] == UNDER_WAY
            late, fresh = fresh[under_way], fresh[~under_way]
            self._verify_shards(fresh)
            until = time.monotonic() + MOST_WAIT
            while (self.asked[late] == UNDER_WAY).any() and time.monotonic() < until:
                time.sleep(BLOCK_POLL_SECONDS)
            fresh = self._without_copies(late)
        self._verify_shards(fresh)

    def _verify_shards(self, fresh: np.ndarray) -> None:
        """Verify blocks in the shards."""
        self.asked[fresh] = TAKEN
        groups = self._groups(fresh)

        def verify(item: int) -> None:
            number, blocks = groups[item]
            self._verify_group(number, blocks)

        if groups:
            self._blocks.each(verify, len(groups))
            self.verified[fresh] |= SOURCE

    def _groups(self, blocks: np.ndarray) -> list[tuple[int, list[int]]]:
        """Neighbouring blocks, which are one read, with the number of their shard."""
        if not blocks.size:
            return []
        owners = self._ends.searchsorted(blocks, "right")
        # The datasets of a shard have different places in the file.
        apart = (np.diff(blocks) > 1) | (np.diff(owners) > 0)
        for name in self.names[1:]:
            apart |= np.isin(blocks[1:], self._first_block[name])
        groups = [
            group[first : first + VERIFIED_TOGETHER].tolist()
            for group in np.split(blocks, np.flatnonzero(apart) + 1)
            for first in range(0, len(group), VERIFIED_TOGETHER)
        ]
        return [(int(self._ends.searchsorted(group[0], "right")), group) for group in groups]

    def _extent(self, number: int, blocks: list[int]) -> tuple[str, int, int, int]:
        """Dataset, number of the first block in it, offset and size of neighbouring blocks."""
        begun = [name for name in self.names if self._first_block[name][number] <= blocks[0]]
        dataset = begun[-1]
        offset, nbytes = self.shards[number].extents(str(self.dtype))[dataset]
        first = blocks[0] - int(self._first_block[dataset][number])
        left = nbytes - first * HASHED_BYTES
        return dataset, first, offset + first * HASHED_BYTES, min(len(blocks) * HASHED_BYTES, left)

    def _without_copies(self, blocks: np.ndarray) -> np.ndarray:
        """Note which blocks the cache has, by their hashes. Returns the others."""
        for number, group in self._groups(blocks):
            shard = self._files[number]
            dataset, _, offset, nbytes = self._extent(number, group)
            if (copy := shard.copy_of(dataset)) < 0:
                continue
            memory = np.empty(nbytes, np.uint8).data
            if error := why_unread(copy, memory, offset):
                self._leave_cache(error)
                break
            wanted = shard.table[group[0] - int(self._first_block[self.names[0]][number]) :]
            found = block_hashes(memory)
            self.verified[np.array(group)[found == wanted[: len(group)]]] |= COPY
        left: np.ndarray = blocks[self.verified[blocks] == 0]
        return left

    def _leave_cache(self, error: OSError) -> None:
        """Read from the shards alone. They are verified again where only copies were."""
        if self.cache is not None:
            self.cache.stop(error)
        self.cache = None
        self.verified &= SOURCE

    def _verify_group(self, number: int, blocks: list[int]) -> None:
        """Read and verify neighbouring blocks of one dataset of a shard."""
        shard = self._files[number]
        begin = int(self._first_block[self.names[0]][number])
        dataset, first, offset, nbytes = self._extent(number, blocks)
        array = np.empty(nbytes, np.uint8)
        memory = array.data
        shard.fill(dataset, memory, offset)
        for place, block in enumerate(blocks):
            part = slice(place * HASHED_BYTES, (place + 1) * HASHED_BYTES)
            wanted = int(shard.table[block - begin])
            if xxhash.xxh3_64_intdigest(memory[part]) == wanted:
                continue
            # The copy in memory may be what is wrong, so the disk is to be read again.
            at = offset + part.start
            descriptor, size = shard.descriptors[dataset], len(memory[part])
            os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_DONTNEED)
            shard.fill(dataset, memory[part], at)
            if xxhash.xxh3_64_intdigest(memory[part]) != wanted:
                raise damaged_block(shard.path, shard.shard, dataset, first + place)
        if self.limit is not None and dataset == self.names[0]:
            tokens = array.view(self.dtype)
            if tokens.max() >= self.limit:
                place = int(tokens.argmax())
                block = first + place * self.dtype.itemsize // HASHED_BYTES
                raise beyond_vocabulary(shard.path, block, int(tokens[place]), self.limit)
        copy = shard.copy_of(dataset)
        if self.cache is not None and copy >= 0 and self.cache.keep(copy, memory, offset):
            self.verified[blocks] |= COPY

    def _open(self, number: int) -> None:
        """Have a shard open, with nothing verified if its file has changed."""
        shard = self._files.get(number)
        if shard is not None and shard.has_changed():
            self._close(number)
            shard = None
        if shard is None:
            of = self.shards[number]
            shard = OpenedShard.open(self.directory / of.name, of, str(self.dtype), self.cache)
            if self._seen.setdefault(number, shard.identity) != shard.identity:
                self._seen[number] = shard.identity
                self.verified[
                    int(self._first_block[self.names[0]][number]) : self._ends[number]
                ] = 0
            self._files[number] = shard
            for name, descriptors in self._descriptors.items():
                descriptors[number] = shard.descriptors[name]
                descriptors[~number] = shard.copy_of(name)
        self._checked.add(number)

    def _keep_open(self, most: int) -> None:
        while len(self._files) > most:
            self._close(next(iter(self._files)))

    def _close(self, number: int) -> None:
        self._checked.discard(number)
        shard = self._files.pop(number)
        shard.close()
        if shard.copy >= 0:
            # When the shard is opened again, its copy may be another file.
            begin = int(self._first_block[self.names[0]][number])
            self.verified[begin : self._ends[number]] &= SOURCE

    def close(self) -> None:
        """Close the shards."""
        with self._reading:
            self._keep_open(0)


def every_block(first: np.ndarray, last: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The numbers of all blocks of some reads, rising and each once."""
    pairs = zip(first[which].tolist(), (last[which] + 1).tolist(), strict=True)
    return np.unique(np.concatenate([np.empty(0, np.int64), *(np.arange(*pair) for pair in pairs)]))
