"""Reads micro-batches ahead in worker processes or threads, and returns them in order.

The process that `fork_server` has started forks the worker processes; this one does not. torch's
DataLoader brings the batches from the workers to this process.
"""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hpc_train.data.pickled import Sent
from hpc_train.data.reader import Reader
from hpc_train.data.substitutes import Substituted
from hpc_train.errors import HpcTrainError, RankError, error_in_words

Task = tuple[int, Sequence[int], np.ndarray]  # step, positions in its batch, indices


class _Micro(Dataset[bytes]):
    """The data set of a worker's DataLoader. An item is a pickled micro-batch or error.

    It is pickled here, because a queue of Python's drops objects that cannot be pickled, and tells
    nobody.
    """

    def __init__(self, sent: Sent, seed: int) -> None:
        self.sent: Sent | None = sent
        self.seed = seed
        self.reader: Reader | None = None  # made in the worker, as its lock cannot be pickled

    def __getitem__(self, task: Task) -> bytes:
        try:
            return self._read(*task)
        except HpcTrainError as error:
            return pickle.dumps(error)
        except BaseException as error:  # noqa: BLE001  # raised where the step is asked for
            traceback.print_exc()
            remedy = MANY_FILES if _many_files(error) else "its log has the worker's traceback"
            return pickle.dumps(RankError(error_in_words(error), remedy))

    def _read(self, number: int, places: Sequence[int], indices: np.ndarray) -> bytes:
        if self.sent is not None:
            sent, self.sent = self.sent, None
            dataset, collate_fn = sent.load()  # this worker's copy
            self.reader = Reader(dataset, collate_fn=collate_fn)
        assert self.reader is not None
        with self.reader.naming(f"step {number}"):
            read = self.reader.read_of_step(indices, self.seed, number, places)
            return bytes(ForkingPickler.dumps(read))


def _many_files(error: BaseException) -> bool:
    """Whether an error says that too many files are open, as the system or `multiprocessing`."""
    return any(sign in str(error) for sign in (os.strerror(errno.EMFILE), "items of ancdata"))


MANY_FILES = (
    "each tensor that a worker sends is an open file, so raise `ulimit -n`, or let a collate_fn "
    "put tensors together"
)
CODE_SECONDS = 2.0  # seconds to wait for the exit code of the worker that ended first


class Processes:
    """Worker processes that read micro-batches ahead.

    Args:
        reader: reads the data set, which is pickled into each worker.
        seed: the seed of the sample order.
        tasks: the micro-batches, in order.
        workers: number of processes.
        ahead: number of micro-batches that are read ahead, at least one by each worker.

    Raises:
        Exception: the data set cannot be pickled, or the fork server does not answer.
    """

    def __init__(
        self, reader: Reader, seed: int, tasks: Iterable[Task], workers: int, ahead: int
    ) -> None:
        before = multiprocessing.active_children()
        sent = Sent((reader.dataset, reader.collate_fn))
        # In the main thread torch would set a handler of SIGCHLD, so this is another one.
        with closing(sent), ThreadPoolExecutor(1) as thread, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cores and pickling, which the caller reports
            self._batches: Iterator[bytes] | None = thread.submit(
                _iterator, _Micro(sent, seed), tasks, workers, ahead
            ).result()
        self._workers = [one for one in multiprocessing.active_children() if one not in before]
        self._substitutes = getattr(reader.dataset, "substitutes", None)
        for one in self._workers:
            _poll_one_by_one(one)
        atexit.register(self.kill)  # Python would ask them to end by SIGTERM, which they ignore

    def __iter__(self) -> Iterator[Any]:
        assert self._batches is not None
        for batch in self._batches:
            read = pickle.loads(batch)
            if isinstance(read, HpcTrainError):
                raise read
            if isinstance(read, Substituted) and self._substitutes is not None:
                self._substitutes.tell(read.causes)  # the log is in this process
            yield read

    def check(self, number: int, error: BaseException | None = None, patience: float = 0.0) -> None:
        """Raise an error if a worker has ended, or more files are open than may be.

        Args:
            number: the step that is awaited, for the message.
            error: what was raised here. Workers end with exit code 0 after it, which is no cause.
            patience: for how many seconds a worker may be ending.

        Raises:
            RankError: a worker has ended, or `error` comes of open files.
        """
        code = self._code(patience)
        if code is not None and (code or error is None):
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RankError(
                f"a worker that read samples of step {number} or a later one ended with {how}",
                "if memory was short, use fewer workers"
                if -code in (signal.SIGKILL, signal.SIGBUS)
                else "the output of its rank may say why",
            )
        if error is not None and _many_files(error):
            raise RankError(error_in_words(error), MANY_FILES) from error
        if isinstance(error, EOFError):  # the thread of a worker that sends files cannot open one
            raise RankError(f"a worker did not send a batch of step {number}", MANY_FILES)

    def _code(self, patience: float) -> int | None:
        """The exit code of a worker, if one ends within some seconds."""
        if not connection.wait([one.sentinel for one in self._workers], patience):
            return None
        # When a worker is killed, DataLoader ends the others, whose exit code 0 may come first.
        codes: list[int] = []
        until = time.monotonic() + CODE_SECONDS
        while not any(codes) and time.monotonic() < until:
            codes = [code for one in self._workers if (code := one.exitcode) is not None]
            time.sleep(0.0 if any(codes) else 0.01)
        return min(filter(None, codes), default=0)  # killed ones have negative codes

    def end(self) -> None:
        """Let each worker end after the micro-batch that it is reading."""
        self._batches = None

    def kill(self) -> None:
        """Kill the workers. Nothing is lost, as they only read."""
        atexit.unregister(self.kill)
        for one in self._workers:
            if one.is_alive():
                one.kill()


def _poll_one_by_one(worker: Any) -> None:
    """Let only one thread at a time ask for a worker's exit code: DataLoader's or ours.

    The fork server sends the code only once. A second reader would get exit code 255.
    """
    poll, lock = worker._popen.poll, threading.Lock()

    def locked(flag: int = os.WNOHANG) -> int | None:
        with lock:
            code: int | None = poll(flag)
            return code

    worker._popen.poll = locked


def _iterator(micro: _Micro, tasks: Iterable[Task], workers: int, ahead: int) -> Iterator[bytes]:
    return iter(
        DataLoader(
            micro,
            batch_size=None,
            sampler=tasks,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            num_workers=workers,
            prefetch_factor=max(1, -(-ahead // workers)),
            worker_init_fn=_end_with_rank,
            multiprocessing_context="forkserver",
            generator=torch.Generator(),  # else DataLoader draws from the process's generator
        )
    )


def _as_it_is(read: bytes) -> bytes:
    return read


def _end_with_rank(_: int) -> None:
    """End this worker when its rank has ended. The fork server, which is its parent, reaps it."""
    rank = multiprocessing.parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with rank", daemon=True).start()


class Threads:
    """Threads that read micro-batches ahead, each with a function of its own.

    Args:
        read: for each thread a function that reads a micro-batch.
        stop: tells the threads to end.
    """

    def __init__(self, read: Sequence[Callable[[Task], Any]], stop: threading.Event) -> None:
        self._stop = stop
        self._asked: list[queue.SimpleQueue[Task]] = [queue.SimpleQueue() for _ in read]
        self._given: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in read]
        for number, function in enumerate(read):
            threading.Thread(
                target=self._read, args=(number, function), name="samples", daemon=True
            ).start()

    def read(self, tasks: Iterable[Task], ahead: int) -> Iterator[Any]:
        """Read these micro-batches, at most `ahead` of them in advance. Iterate to the end."""
        rest, asked, given, many = iter(tasks), 0, 0, len(self._asked)
        while True:
            while asked < given + ahead and (task := next(rest, None)) is not None:
                self._asked[asked % many].put(task)
                asked += 1
            if given == asked:
                return
            found = self._wait(self._given[given % many])
            if found is None:
                return
            item, error = found
            if error is not None:
                raise error
            given += 1
            yield item

    def _read(self, number: int, function: Callable[[Task], Any]) -> None:
        while (task := self._wait(self._asked[number])) is not None:
            try:
                self._given[number].put((function(task), None))
            except BaseException as error:  # noqa: BLE001  # raised where it is asked for
                self._given[number].put((None, error))

    def _wait(self, items: queue.SimpleQueue[Any]) -> Any:
        while not self._stop.is_set():
            with suppress(queue.Empty):
                return items.get(timeout=0.1)
        return None
