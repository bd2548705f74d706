"""The loader delivers this rank's micro-batches of each step. It reads ahead where that is safe."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_train.data.fork_server import why_no_processes
from hpc_train.data.leaves import fewer_rows
from hpc_train.data.lengths import items_in
from hpc_train.data.methods import ahead_of
from hpc_train.data.mixture import datasets_in
from hpc_train.data.order import SampleOrder, samples_said
from hpc_train.data.pickled import deep_copies_of
from hpc_train.data.pinned import pinned
from hpc_train.data.reader import Reader
from hpc_train.data.workers import Processes, Task, Threads
from hpc_train.errors import ConfigError, HpcTrainError, UserError, plural

logger = logging.getLogger(__name__)

LOADER_POLL_SECONDS = 0.1  # seconds between checks for stop requests and dead workers
DATA_SET_PATIENCE = 5.0  # seconds that `close` waits for the data set to return


class GivenUp(Exception):
    """The loader's `give_up` has returned True while a step was awaited."""


@dataclass(frozen=True)
class Part:
    """Some samples of a step's batch: a rank's share, or one of its micro-batches.

    Args:
        places: the samples' positions in the step's whole batch, rising.
        longest: the length of the longest one; 0 if all samples of the data set have one length.
        counted: whether the samples count. If not, they are read because all ranks need as many
            micro-batches.
    """

    places: range | tuple[int, ...]
    longest: int = 0
    counted: bool = True

    @property
    def first(self) -> int:
        """The position of the first sample."""
        return self.places[0]

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.places)

    @property
    def form(self) -> tuple[int, int]:
        """Number of samples and the longest one, which decide the shape of activations."""
        return self.count, self.longest

    def items(self, batch: Any, counted: Callable[[Any], int] | None) -> int:
        """What the loss of these samples is a mean over: the samples, or what `counted` counts."""
        if not self.counted:
            return 0
        return self.count if counted is None else items_in(batch, counted)


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch and its data, as the data set's `fetch` or the collate_fn returned it.

    `items` is the number of samples, or what the loader's `counted` has counted.
    """

    part: Part
    data: Any
    items: int


@dataclass(frozen=True)
class Step:
    """A step's number, its epoch from 0, and this rank's micro-batches."""

    number: int
    epoch: int
    micro_batches: list[MicroBatch]


@dataclass(frozen=True)
class ReadHere:
    """Stands in the queue for a step that the main thread is to read itself."""

    number: int


def cut(batch: int, ranks: int, rank: int, micro_batch: int | None = None) -> list[Part]:
    """Cut a batch over ranks and micro-batches.

    Args:
        batch: samples per step over the whole job.
        ranks: data-parallel size.
        rank: this rank's place among them.
        micro_batch: samples per micro-batch; by default the rank's whole share.

    Returns:
        The rank's micro-batches, in order and without gaps.

    Raises:
        ConfigError: the batch cannot be cut evenly.
    """
    if micro_batch and not batch % ranks and micro_batch > batch // ranks:
        raise ConfigError(
            f"data.micro_batch is {micro_batch}, but of data.batch {batch} a rank has "
            f"{batch // ranks}",
            f"give a number that divides {batch // ranks}, or leave data.micro_batch out",
        )
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
    firsts = range(rank * share, (rank + 1) * share, size)
    return [Part(range(first, first + size)) for first in firsts]


class Loader:
    """Delivers the steps `first_step` to `last_step` in order. Iterate over it once.

    Random numbers that the data set draws depend only on the order's seed, the step, and the
    sample's position in its batch (see `Reader`). A thread reads ahead only if the data set draws
    none in the first step: it would otherwise disturb the generators that the model draws from.
    Worker processes always read ahead, as they have generators of their own. The batches are the
    same in all cases.

    If the data set has a method `ahead` and an attribute `samples_ahead`, the loader calls
    `dataset.ahead(indices)` for each step but the first one, about that many samples before they
    are read. It does so in this process, also where workers read.

    Args:
        dataset: a data set that `Reader` takes, or a `Reader`.
        order: which samples belong to which step.
        parts: this rank's micro-batches, from `cut`, or a function of the step that returns them.
        first_step, last_step: the steps to deliver.
        prefetch: number of steps that a thread reads ahead; with 0 each is read when it is needed.
        workers: number of worker processes, each of which reads at least one micro-batch ahead.
            They need a call of `start_workers` and a data set that can be pickled. Without these,
            as many threads read, all but the first from copies of the data set.
        collate_fn: as `Reader` takes it.

    Raises:
        UserError: a collate_fn was given for a data set with `fetch`.
        ConfigError: prefetch or workers is negative.

    The attribute `give_up` is a function. The loader calls it before it reads a micro-batch and
    while it waits for a step. If it returns True, iterating raises `GivenUp`. The attribute
    `counted` may be a function of a batch, which gives the number of `items` of a micro-batch. With
    `pinned` the tensors of batches lie in pinned memory, for a GPU.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        parts: list[Part] | Callable[[int], list[Part]],
        *,
        first_step: int,
        last_step: int,
        prefetch: int = 2,
        workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        for name, value in (("prefetch", prefetch), ("workers", workers)):
            if value < 0:
                raise ConfigError(f"{name} is {value}", "give 0 or more")
        if not isinstance(dataset, Reader):
            dataset = Reader(dataset, collate_fn=collate_fn)
        self.reader: Reader = dataset
        self.order = order
        self.parts_of = parts if callable(parts) else lambda step: parts
        self.steps = range(first_step, last_step + 1)
        self.prefetch, self.workers = min(prefetch, len(self.steps)), workers
        self.ahead = 0  # number of micro-batches that are read ahead
        self.give_up: Callable[[], bool] = lambda: False
        self.counted: Callable[[Any], int] | None = None
        self.pinned = False
        self._lacking = False  # whether a batch seemed to lack samples
        self._stop = threading.Event()
        # `_places` holds one item for each free place. A queue.Queue of limited size is slower.
        self._queue: queue.SimpleQueue[Step | ReadHere | BaseException] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(max(1, self.prefetch)):
            self._places.put(None)
        self._thread: threading.Thread | None = None
        self._processes: Processes | None = None
        self._looked = threading.Event()
        self._indices: dict[int, list[np.ndarray]] = {}  # of steps that the data set was told of
        self._told = first_step  # the last of these steps

    def __iter__(self) -> Iterator[Step]:
        if not self.steps:
            return
        self.ahead = max(self.prefetch * len(self.parts_of(self.steps.start)), self.workers)
        if self.workers:
            self._start_processes()
        for number in self.steps:
            if self._thread is not None:
                yield self._next(number)
                continue
            step = self._read(number)
            if self.ahead and not self.reader.drawn:
                rest = range(number + 1, self.steps.stop)
                self._start(self._read_ahead, rest, self._functions())
            elif self.ahead and number == self.steps.start:
                logger.info(
                    "the data set draws random numbers (%s): no batch is read ahead",
                    self.reader.sources,
                )
            yield step

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        if any(
            callable(getattr(one, "set_epoch", None)) for one in datasets_in(self.reader.dataset)
        ):
            logger.warning(
                "the data set has a method set_epoch, and its samples are read ahead, so a call of "
                "it changes later samples only, and none that workers read: set workers and "
                "prefetch to 0 if samples depend on it"
            )
        self._thread = threading.Thread(target=target, args=arguments, name="loader", daemon=True)
        self._thread.start()

    def _start_processes(self) -> None:
        why = why_no_processes()
        if not why:
            tasks = self._tasks(self.steps)
            try:
                self._processes = Processes(
                    self.reader, self.order.seed, tasks, self.workers, self.ahead
                )
            except Exception as error:  # noqa: BLE001  # whatever pickling somebody's objects raises
                why = f"the data set cannot be sent to one ({type(error).__name__}: {error})"
        if self._processes is not None:
            self._start(self._take, self._processes)
        else:
            logger.info(
                "samples are read by %s, and not by worker processes: %s",
                plural(self.workers, "thread"),
                why,
            )

    def close(self) -> None:
        """Stop threads and workers. If the data set does not return, its thread is left running."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(DATA_SET_PATIENCE)
        if self._processes is not None:
            self._processes.kill()
        elif self._thread is not None and self._thread.is_alive():
            logger.warning("the data set is still reading a sample; the loader closes without it")

    def _next(self, number: int) -> Step:
        while True:
            alive = self._thread is not None and self._thread.is_alive()
            try:
                item = self._queue.get(timeout=LOADER_POLL_SECONDS)
                break
            except queue.Empty:
                self._check_workers(number)
                if not alive:
                    raise RuntimeError("the thread that reads ahead has died") from None
                if self.give_up():
                    raise GivenUp from None
        self._places.put(None)
        if isinstance(item, BaseException):
            if not isinstance(item, HpcTrainError):  # such as a connection that has broken
                self._check_workers(number, item)
            raise item
        if isinstance(item, Step):
            return item
        step = self._read(item.number)
        if self.reader.drawn:
            raise UserError(
                f"the data set draws random numbers ({self.reader.sources}) in step {item.number}. "
                "In the first step it drew none, so batches were read ahead",
                f"set {'workers and ' if self.workers else ''}prefetch to 0",
            )
        self._looked.set()
        return step

    def _check_workers(self, number: int, error: BaseException | None = None) -> None:
        if self._processes is not None:
            self._processes.check(number, error, DATA_SET_PATIENCE if error else 0.0)

    def _indices_of(self, number: int) -> list[np.ndarray]:
        """The samples of a step's parts. Tells the data set which ones it will read later."""

        def compute(step: int) -> list[np.ndarray]:
            return [self._of_part(step, part) for part in self.parts_of(step)]

        indices = self._indices.pop(number, None) or compute(number)
        ahead = ahead_of(self.reader.dataset)
        if ahead is not None:
            samples = sum(part.count for part in self.parts_of(number))
            distance = samples_said(self.reader.dataset, "samples_ahead")
            steps = self.prefetch + max(1, distance // samples)
            for later in range(self._told + 1, min(number + steps + 1, self.steps.stop)):
                self._indices[later] = compute(later)
                ahead(np.concatenate(self._indices[later]))
                self._told = later
        return indices

    def _read(self, number: int) -> Step:
        def fetch(part: Part, indices: np.ndarray) -> Any:
            if self.give_up():
                raise GivenUp
            with self.reader.naming(f"step {number}"):
                return self.reader.read_of_step(indices, self.order.seed, number, part.places)

        parts = self.parts_of(number)
        return self._step(number, list(map(fetch, parts, self._indices_of(number))))

    def _of_part(self, number: int, part: Part) -> np.ndarray:
        """The samples of a part of a step."""
        if isinstance(part.places, range):
            return self.order.indices(number, part.first, part.count)
        return self.order.indices(number, 0, self.order.batch)[list(part.places)]

    def _step(self, number: int, data: Iterable[Any]) -> Step:
        micro_batches = [
            self._micro_batch(part, batch)
            for part, batch in zip(self.parts_of(number), data, strict=True)
        ]
        return Step(number, self.order.epoch(number), micro_batches)

    def _micro_batch(self, part: Part, batch: Any) -> MicroBatch:
        look = self.counted is None and part.counted and not self._lacking
        if look and (rows := fewer_rows(batch, part.count)):
            self._lacking = True
            logger.warning(
                "a batch of %s has tensors of %s each, and its loss counts as the mean over all "
                "samples: if samples are left out, let the data set give others instead, or give "
                "a loop the option `counted`",
                plural(part.count, "sample"),
                plural(rows, "row"),
            )
        data = pinned(batch) if self.pinned else batch
        return MicroBatch(part, data, part.items(batch, self.counted))

    def _tasks(self, numbers: Iterable[int]) -> Iterator[Task]:
        for number in numbers:
            parts = self.parts_of(number)
            for part, indices in zip(parts, self._indices_of(number), strict=True):
                yield number, part.places, indices

    def _take(self, processes: Processes) -> None:
        """Take steps from worker processes."""
        try:
            self._put_steps(self.steps, iter(processes))
        except BaseException as error:  # noqa: BLE001  # raised where the step is asked for
            self._put(error)
        finally:
            processes.end()

    def _read_ahead(self, numbers: range, read: list[Callable[[Task], Any]]) -> None:
        try:
            threads = Threads(read, self._stop) if len(read) > 1 else None
            looks = self.reader.may_draw
            while numbers and not self._stop.is_set():
                since = numbers.start - self.steps.start
                # A data set that drew nothing in the first step may draw later. In this thread that
                # could not be told from what the model draws. So the main thread reads some steps
                # itself: those 1, 2, 4, 8 ... after the first.
                if looks and since.bit_count() == 1:
                    self._put(ReadHere(numbers.start))
                    self._wait()
                    numbers = numbers[1:]
                    continue
                run = numbers[: (1 << since.bit_length()) - since] if looks else numbers
                tasks = self._tasks(run)
                self._put_steps(
                    run, threads.read(tasks, self.ahead) if threads else map(read[0], tasks)
                )
                numbers = numbers[len(run) :]
        except BaseException as error:  # noqa: BLE001  # raised where the step is asked for
            self._put(error)

    def _functions(self) -> list[Callable[[Task], Any]]:
        """For each thread a function that reads a task. All but the first read from copies."""
        readers = [self.reader]
        try:
            one = self.reader.dataset
            copies = deep_copies_of(one, datasets_in(one), self.workers - 1)
            readers += [Reader(one, None, self.reader.collate_fn) for one in copies]
        except Exception as error:  # noqa: BLE001  # whatever copying somebody's objects raises
            logger.info(
                "samples are read by one thread: the data set cannot be copied for others (%s: %s)",
                type(error).__name__,
                error,
            )

        def function(reader: Reader) -> Callable[[Task], Any]:
            def read(task: Task) -> Any:
                with reader.naming(f"step {task[0]}"):
                    return reader.read_beside(task[2])

            return read

        return [function(reader) for reader in readers]

    def _put_steps(self, numbers: range, data: Iterator[Any]) -> None:
        for number in numbers:
            of_step = [batch for _, batch in zip(self.parts_of(number), data, strict=False)]
            if self._stop.is_set():
                return
            self._put(self._step(number, of_step))

    def _wait(self) -> None:
        while not (self._stop.is_set() or self._looked.wait(LOADER_POLL_SECONDS)):
            pass
        self._looked.clear()

    def _put(self, item: Step | ReadHere | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._places.get(timeout=LOADER_POLL_SECONDS)
            except queue.Empty:
                continue
            self._queue.put(item)
            return
