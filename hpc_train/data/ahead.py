"""Brings blocks that will be read later to the node's cache, in a thread of its own."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from hpc_train.data.manifest import HASHED_BYTES, StoredShard
from hpc_train.data.shard_files import TAKEN, UNDER_WAY, ShardFiles, every_block
from hpc_train.errors import HpcTrainError

AHEAD_READERS = 4  # most threads that bring blocks to the cache ahead of need
AHEAD_BYTES = 1 << 26  # bytes of blocks that are asked for ahead of need
THREAD_PATIENCE = 5.0  # seconds to wait for a read that is under way at the end

Wanted = tuple[np.ndarray, np.ndarray]  # shards and first bytes of some reads


class Ahead:
    """Brings the blocks of coming reads to the cache.

    It never delays a read: it has descriptors of its own. What fails here is told by the read.

    Args:
        files: the shards that will be read from. They have a cache.
        nbytes: the number of bytes of each read.
    """

    def __init__(self, files: ShardFiles[Any], nbytes: int) -> None:
        self._wanted: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        arguments = self._wanted, self._ended, _Asking(files, nbytes)
        # A daemon, because a read that never returns must not keep the program from its end.
        self._thread = threading.Thread(target=_ask, args=arguments, name="ahead", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._wanted.put, None)

    def ask(self, numbers: np.ndarray, begins: np.ndarray) -> None:
        """Ask for some reads: their shards, rising, and their first bytes, int64 (N,) each."""
        self._wanted.put((numbers, begins))

    def close(self) -> None:
        """End the thread. If a read does not return, it is left running."""
        self._ended.set()
        self._wanted.put(None)
        self._thread.join(THREAD_PATIENCE)


class _Asking(ShardFiles[StoredShard]):
    """The same shards, opened once more, so that nothing here keeps a read waiting."""

    readers = AHEAD_READERS

    def __init__(self, files: ShardFiles[Any], nbytes: int) -> None:
        self.__setstate__(files.__getstate__())
        self.nbytes = nbytes
        self.seen, self.asked = files.verified, files.asked

    def ask(self, numbers: np.ndarray, begins: np.ndarray) -> None:
        """Bring what some reads need to the cache.

        Raises:
            HpcTrainError: as `read` raises it.
        """
        for first in range(0, len(numbers), self._most):
            part = slice(first, first + self._most)
            self._ask(numbers[part], begins[part])
            self._keep_open(self._most)

    def _ask(self, numbers: np.ndarray, begins: np.ndarray) -> None:
        if self.cache is None or not self.cache.has_room(HASHED_BYTES):
            return
        first, last = self._blocks_of(numbers, begins, self.nbytes, self.names[0])
        new = (self.seen[first] & self.seen[last]) == 0
        self._open_all(numbers[new].tolist())
        blocks = every_block(first, last, new)
        blocks = blocks[self.seen[blocks] | self.asked[blocks] | self.verified[blocks] == 0]
        blocks = self._without_copies(blocks)
        # The system reads all of them at once. Threads would read a few at a time.
        groups = self._groups(blocks)
        for number, group in groups:
            dataset, _, offset, nbytes = self._extent(number, group)
            descriptor, advice = self._descriptors[dataset][number], os.POSIX_FADV_WILLNEED
            with suppress(OSError):  # some file systems take no advice
                os.posix_fadvise(descriptor, offset, nbytes, advice)

        def bring(item: int) -> None:
            number, group = groups[item]
            if not (self.asked[group] | self.seen[group]).any():  # else it is being read
                self.asked[group] = UNDER_WAY
                try:
                    self._verify_group(number, group)
                finally:
                    self.asked[group] = TAKEN

        self._blocks.each(bring, len(groups))


def _ask(wanted: queue.SimpleQueue[Wanted | None], ended: threading.Event, asking: _Asking) -> None:
    while (some := wanted.get()) is not None and not ended.is_set():
        with suppress(HpcTrainError):
            asking.ask(*some)
    asking.close()
