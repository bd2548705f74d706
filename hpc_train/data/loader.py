"""The loader: for each step, this rank's micro-batches, read ahead by a thread where that is safe.

A thread and not a process: MPI must not be forked, and reading releases the interpreter's lock.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpc_train.data.order import SampleOrder
from hpc_train.data.reader import Reader
from hpc_train.errors import ConfigError, UserError
from hpc_train.seeds import mix

logger = logging.getLogger(__name__)

OFTEN = 0.1  # seconds between two looks at what else may have happened
PATIENCE = 5.0  # seconds for a data set to return when nobody wants its samples any more
SAMPLES = 1  # distinguishes what samples draw from what the model draws


class GivenUp(Exception):
    """Whoever waits for a step has something else to do."""


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

    Random numbers that the data set draws belong to the order's seed, the step, and the sample's
    place in its batch (see `Reader`). A thread reads ahead if the first step shows that the data
    set draws none: else it would disturb the generators of whoever computes meanwhile.

    Args:
        dataset: `len(dataset)` samples, as `Reader` takes them; or a reader of such.
        order: which samples belong to which step.
        parts: this rank's micro-batches, from `cut`.
        first_step, last_step: the steps to deliver.
        prefetch: steps read ahead by a thread; with 0 they are read when they are asked for.

    `give_up` is asked before a micro-batch is read, and while a step read ahead is waited for;
    if it gives True, iterating raises `GivenUp`.
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
        self.reader = dataset if isinstance(dataset, Reader) else Reader(dataset)
        self.order = order
        self.parts = parts
        self.steps = range(first_step, last_step + 1)
        self.prefetch = prefetch
        self.give_up: Callable[[], bool] = lambda: False
        self._stop = threading.Event()
        self._queue: queue.Queue[Step | int | BaseException] = queue.Queue(max(1, prefetch))
        self._thread: threading.Thread | None = None
        self._looked = threading.Event()

    def __iter__(self) -> Iterator[Step]:
        for number in self.steps:
            if self._thread is not None:
                yield self._next()
                continue
            step = self._read(number)
            if self.prefetch and not self.reader.drawn:
                rest = range(number + 1, self.steps.stop)
                self._thread = threading.Thread(
                    target=self._read_ahead, args=(rest,), name="loader", daemon=True
                )
                self._thread.start()
            elif self.prefetch and number == self.steps.start:
                logger.info(
                    "the data set draws random numbers (%s): none is read ahead",
                    self.reader.sources,
                )
            yield step

    def close(self) -> None:
        """Stop the thread, but leave it behind if the data set does not return."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                logger.warning("the data set still reads a sample, and is not waited for")

    def _next(self) -> Step:
        item = None
        while item is None:
            alive = self._thread is not None and self._thread.is_alive()
            try:
                item = self._queue.get(timeout=OFTEN)
            except queue.Empty:
                if not alive:
                    raise RuntimeError("the thread that reads ahead has died") from None
                if self.give_up():
                    raise GivenUp from None
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, Step):
            return item
        step = self._read(item)
        if self.reader.drawn:
            raise UserError(
                f"the data set draws random numbers ({self.reader.sources}) in step {item}, and "
                "drew none in the first step, so that it was read ahead",
                "set data.prefetch to 0",
            )
        self._looked.set()
        return step

    def _read(self, number: int) -> Step:
        return self._step(number, self._fetch)

    def _fetch(self, number: int, part: Part, indices: Any) -> Any:
        if self.give_up():
            raise GivenUp
        seeds = partial(mix, self.order.seed, SAMPLES, number)
        return self.reader.read(indices, lambda place: seeds(part.first + place))

    def _step(self, number: int, fetch: Callable[[int, Part, Any], Any]) -> Step:
        micro_batches = []
        for part in self.parts:
            indices = self.order.indices(number, part.first, part.count)
            micro_batches.append(MicroBatch(part, fetch(number, part, indices)))
        return Step(number, self.order.epoch(number), micro_batches)

    def _read_ahead(self, numbers: range) -> None:
        def fetch(number: int, part: Part, indices: Any) -> Any:
            return self.reader.read_beside(indices)

        try:
            for number in numbers:
                if self._stop.is_set():
                    return
                # A data set that drew nothing in the first step may draw later, which this thread
                # could not tell from what the model draws. So some steps are left to the other
                # one: 1, 2, 4, 8 ... after the first.
                if (number - self.steps.start).bit_count() == 1:
                    self._put(number)
                    self._wait()
                else:
                    self._put(self._step(number, fetch))
        except BaseException as error:  # noqa: BLE001  # raised where the step is asked for
            self._put(error)

    def _wait(self) -> None:
        while not (self._stop.is_set() or self._looked.wait(OFTEN)):
            pass
        self._looked.clear()

    def _put(self, item: Step | int | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=OFTEN)
            except queue.Full:
                continue
            return
