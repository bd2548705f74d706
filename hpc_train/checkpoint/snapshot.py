"""Keep a rank's extents while training goes on to change the tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from hpc_train.checkpoint.exchange import Exchange
from hpc_train.checkpoint.parts import Bytes
from hpc_train.errors import CheckpointError

Kept = tuple[int, Bytes] | None


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Tell a lack of memory in a block as one of a checkpoint.

    Raises:
        CheckpointError: there was too little for `what`.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise  # torch's allocators raise a RuntimeError, which says it
        first = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"there is no memory for {what} of a checkpoint ({first})",
            "give each rank more memory, or set checkpoint.background to false",
        ) from error


class Snapshot:
    """Memory for the extents of this rank, the same for one checkpoint after the other.

    Parameters and optimizer state change when the optimizer steps, not before; so a rank that holds
    all tensors copies them in the thread that writes, while the next step's forward and backward
    pass run, and only the optimizer waits for it. What comes from other ranks is copied at once.
    """

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)
        self._taken = threading.Event()
        self._taken.set()

    def wait(self) -> None:
        """Wait until the tensors may be changed."""
        self._taken.wait()

    def reserve(self, nbytes: int) -> None:
        """Have memory for the extents of this rank, before `of`. It calls no other rank.

        Raises:
            CheckpointError: there is too little.
        """
        if len(self._memory) >= nbytes:
            return
        pinned = torch.cuda.is_available()
        with enough_memory(f"the {nbytes} bytes"):
            self._memory = np.empty(0, np.uint8)  # what it had counts for what it gets
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).numpy()
            self._memory[:] = 0  # so that the system gives it now

    def of(self, exchange: Exchange, runs: Sequence[Sequence[int]], rounds: int) -> Iterator[Kept]:
        """This rank's extents, as `Exchange.bring` has them. Collective over its replica.

        With a replica of one rank the tensors must not change before `wait` returns.
        """
        room = _Room(self._memory)
        if exchange.replica.comm is not None:
            return iter(list(exchange.bring(runs, rounds, room, own=False)))
        self._taken.clear()
        ready = torch.cuda.Event() if torch.cuda.is_available() else None
        if ready:
            ready.record()
        return self._later(exchange, runs, rounds, room, ready)

    def _later(
        self,
        exchange: Exchange,
        runs: Sequence[Sequence[int]],
        rounds: int,
        room: _Room,
        ready: torch.cuda.Event | None,
    ) -> Iterator[Kept]:
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if ready else nullcontext():
                if ready:
                    ready.wait()
                kept = list(exchange.bring(runs, rounds, room, own=False))
        finally:
            self._taken.set()
        yield from kept


class _Room:
    """Gives one piece of memory after the other."""

    def __init__(self, memory: Bytes) -> None:
        self._rest = memory

    def __call__(self, nbytes: int) -> Bytes:
        """Memory for `nbytes` bytes."""
        given, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return given
