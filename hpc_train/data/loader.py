"""The loader: for each step, this rank's micro-batches, read ahead by a thread.

A thread and not a process: MPI must not be forked, and reading releases the interpreter's lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from hpc_train.data.order import SampleOrder
from hpc_train.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """A rank's share of a batch, or a part of it that is computed at once.

    Args:
        first: place of its first sample in the step's whole batch.
        count: number of samples.
    """

    first: int
    count: int


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch with its data: what the data set's `fetch` or torch's collation gave."""

    part: Part
    data: Any


@dataclass(frozen=True)
class Step:
    """A step's number, its epoch from 0, and this rank's micro-batches."""

    number: int
    epoch: int
    micro_batches: list[MicroBatch]


def cut(batch: int, ranks: int, rank: int, micro_batch: int | None = None) -> list[Part]:
    """Cut a batch over ranks and micro-batches.

    Args:
        batch: samples per step over the whole job.
        ranks: data-parallel size.
        rank: this rank's place among them.
        micro_batch: samples per micro-batch; by default the rank's whole share.

    Returns:
        The rank's micro-batches, consecutive in the batch.

    Raises:
        ConfigError: the batch cannot be cut evenly.
    """
    if batch % (ranks * (micro_batch or 1)):
        unit = ranks * (micro_batch or 1)
        what = f"{ranks} ranks" + (f" x data.micro_batch {micro_batch}" if micro_batch else "")
        near = [n for n in (batch // unit * unit, (batch // unit + 1) * unit) if n]
        raise ConfigError(
            f"data.batch {batch} is not divisible by {what}",
            f"nearest that are: {', '.join(map(str, near))}",
        )
    share = batch // ranks
    size = micro_batch or share
    return [Part(rank * share + first, size) for first in range(0, share, size)]


class Loader:
    """Steps `first_step` to `last_step`, in order; iterate over it once.

    Args:
        dataset: `len(dataset)` samples; `dataset.fetch(indices)` gives a batch of them, or, as for
            any map-style data set of torch, `dataset[i]` a sample, put together by torch's
            `default_collate`.
        order: which samples belong to which step.
        parts: this rank's micro-batches, from `cut`.
        first_step, last_step: the steps to deliver.
        prefetch: steps read ahead by a thread; with 0 they are read when they are asked for.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        parts: list[Part],
        *,
        first_step: int,
        last_step: int,
        prefetch: int = 2,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.parts = parts
        self.steps = range(first_step, last_step + 1)
        self._stop = threading.Event()
        self._queue: queue.Queue[Step | Exception] = queue.Queue(max(1, prefetch))
        self._thread = threading.Thread(target=self._read_ahead, name="loader", daemon=True)
        self._threaded = prefetch > 0
        if self._threaded:
            self._thread.start()

    def __iter__(self) -> Iterator[Step]:
        for number in self.steps:
            yield self._next() if self._threaded else self._read(number)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._threaded:
            self._thread.join()

    def _next(self) -> Step:
        step = self._queue.get()
        if isinstance(step, Exception):
            raise step
        return step

    def _read(self, number: int) -> Step:
        micro_batches = []
        for part in self.parts:
            indices = self.order.indices(number, part.first, part.count)
            micro_batches.append(MicroBatch(part, fetch(self.dataset, indices)))
        return Step(number, self.order.epoch(number), micro_batches)

    def _read_ahead(self) -> None:
        try:
            for number in self.steps:
                if self._stop.is_set():
                    return
                self._put(self._read(number))
        except Exception as error:  # noqa: BLE001  # raised where the step is asked for
            self._put(error)

    def _put(self, item: Step | Exception) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


def fetch(dataset: Any, indices: Any) -> Any:
    """A batch of a data set's samples."""
    if hasattr(dataset, "fetch"):
        return dataset.fetch(indices)
    return default_collate([dataset[int(index)] for index in indices])
