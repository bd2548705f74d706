"""Reads micro-batches by worker processes, or by threads, in the order of their steps.

The processes are forked by Python's fork server, which `start_workers` starts before MPI. From then
on nothing is forked in this process: a worker is asked for over a socket. torch's DataLoader takes
the batches from there to here.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import queue
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hpc_train.data.reader import Reader
from hpc_train.errors import HpcTrainError, RankError, UserError

Task = tuple[int, int, np.ndarray]  # step, place of the first sample in its batch, indices

# What a launcher tells a rank: a worker that loads MPI must not take itself for this rank.
OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "HOROVOD_")
IN_WORKERS = {
    "MPI4PY_RC_INITIALIZE": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Launchers and schedulers send these to all processes of a rank. Only the rank is to act on them.
OF_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GUARD = re.compile(r"^if\b.*__name__.*__main__", re.MULTILINE)


def start_workers() -> None:
    """Start the process that worker processes are forked from; call it before MPI starts.

    Every rank calls it, before `hpc_train.run`, in the part of the script below
    `if __name__ == "__main__":`. It returns at once. A second call does nothing, and neither does
    one in a worker, which imports the script. The workers run on the cores that the rank has now.

    Raises:
        UserError: MPI runs already, or the script does its work when it is imported.
    """
    if _in_worker() or not _missing():
        return
    if _mpi_runs():
        raise UserError(
            "MPI runs already, and a process that uses MPI must not start others",
            "call hpc_train.start_workers() before hpc_train.run(), hvd.init(), and the import of "
            "mpi4py.MPI",
        )
    _check_guard()
    forkserver.set_forkserver_preload(["__main__", "numpy", "torch", __name__])
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, OF_RANK)
    try:
        with _environment_of_workers():
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, OF_RANK)  # which that has unblocked
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    tracker: Any = resource_tracker._resource_tracker
    _never_again(forkserver._forkserver, _missing)
    _never_again(tracker, lambda: "" if tracker._check_alive() else "resource_tracker has ended")


def why_no_processes() -> str:
    """Why samples cannot be read by worker processes; "" if they can."""
    if _in_worker():
        return "this is a worker itself"
    if missing := _missing():
        return missing
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return "torch's sharing strategy file_system would start a process"
    return ""


def _in_worker() -> bool:
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return importing or multiprocessing.parent_process() is not None


def _missing() -> str:
    """Why the fork server cannot be asked; "" if it lives."""
    server: Any = forkserver._forkserver
    pid = server._forkserver_pid
    if pid is None:
        return "hpc_train.start_workers() was not called before MPI started"
    with suppress(ChildProcessError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return ""
    return "the process that forks them has ended; its output says why"


def _mpi_runs() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    horovod = sys.modules.get("horovod.torch")
    return bool((mpi and mpi.Is_initialized()) or (horovod and horovod.is_initialized()))


def _check_guard() -> None:
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", "") or ""
    file = getattr(main, "__file__", None)
    if file is None or name.endswith("__main__"):
        return  # which workers do not import
    with suppress(OSError, UnicodeDecodeError):
        if not GUARD.search(Path(file).read_text()):
            raise UserError(
                f'workers import {file}, and it has no line `if __name__ == "__main__":`',
                "put what the script does below such a line",
            )


@contextmanager
def _environment_of_workers() -> Iterator[None]:
    mine = dict(os.environ)
    for name in mine:
        if name.startswith(OF_LAUNCHERS):
            del os.environ[name]
    os.environ.update(IN_WORKERS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(mine)


def _never_again(server: Any, check: Callable[[], str]) -> None:
    """Have a helper process of Python's not be started anew, which it would be by a fork."""

    def ensure_running() -> None:
        if why := check():
            raise OSError(why)

    server.ensure_running = ensure_running


class _Micro(Dataset[bytes]):
    """Gives a worker's DataLoader whole micro-batches, or why one cannot be read, as bytes.

    As bytes, because a queue of Python's loses without a word what cannot be pickled.
    """

    def __init__(self, reader: Reader, seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = reader.dataset, reader.collate_fn, seed
        self.reader: Reader | None = None  # has a lock, so it is made in the worker

    def __getitem__(self, task: Task) -> bytes:
        number, first, indices = task
        if self.reader is None:
            self.reader = Reader(self.dataset, collate_fn=self.collate_fn)
        try:
            read = self.reader.read_of_step(indices, self.seed, number, first)
            return bytes(ForkingPickler.dumps(read))
        except HpcTrainError as error:
            return pickle.dumps(error)
        except Exception as error:  # noqa: BLE001  # raised where the step is asked for
            traceback.print_exc()
            what = f"{self.reader.place} of step {number}: {type(error).__name__}: {error}"
            return pickle.dumps(RankError(what, "its log has the worker's traceback"))


class Processes:
    """Worker processes that read micro-batches ahead.

    Args:
        reader: of the data set, which is copied into each worker by pickle.
        seed: of the sample order.
        tasks: the micro-batches, in order.
        workers: number of processes.
        ahead: micro-batches that are read ahead, at least one by each worker.

    Raises:
        Exception: the data set cannot be pickled, or the fork server does not answer.
    """

    def __init__(
        self, reader: Reader, seed: int, tasks: Iterable[Task], workers: int, ahead: int
    ) -> None:
        before = multiprocessing.active_children()
        # In a thread: in the main one torch would set a handler of SIGCHLD, for children.
        with ThreadPoolExecutor(1) as thread, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cores, of pickle: the caller tells
            self._batches: Iterator[bytes] | None = thread.submit(
                _iterator, _Micro(reader, seed), tasks, workers, ahead
            ).result()
        self._workers = [one for one in multiprocessing.active_children() if one not in before]
        atexit.register(self.kill)  # Python would ask them to end by SIGTERM, which they ignore

    def __iter__(self) -> Iterator[Any]:
        assert self._batches is not None
        for batch in self._batches:
            read = pickle.loads(batch)
            if isinstance(read, HpcTrainError):
                raise read
            yield read

    def dead(self, timeout: float = 0.0) -> str:
        """How a worker has ended within so many seconds, or ""."""
        if not connection.wait([one.sentinel for one in self._workers], timeout):
            return ""
        codes = [one.exitcode for one in self._workers if one.exitcode is not None]
        code = min(codes, default=1)  # one that was killed, and not one that has ended after it
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def end(self) -> None:
        """Let the workers end when they have read what they are reading."""
        self._batches = None

    def kill(self) -> None:
        """End the workers at once; they have nothing to lose."""
        atexit.unregister(self.kill)
        for one in self._workers:
            if one.is_alive():
                one.kill()


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
            generator=torch.Generator(),  # else it draws from the process's
        )
    )


def _as_it_is(read: bytes) -> bytes:
    return read


def _end_with_rank(_: int) -> None:
    """End this worker when its rank has ended; its parent, the fork server, waits for it."""
    rank = multiprocessing.parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with rank", daemon=True).start()


class Threads:
    """Threads that read micro-batches ahead, each from a copy of the data set.

    Args:
        read: one function for each thread, which reads a micro-batch.
        stop: tells them to end.
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
        """Read these micro-batches, so many of them ahead; iterate to the end."""
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
