"""Start the process that forks worker processes: Python's fork server, without MPI.

A process that uses MPI must not start other processes. So `start_workers` starts the fork server
before MPI. A rank that was started warm can get a fork server at any time, from the server that
has forked the rank.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.warm import beside
from hpc_train.warm.meeting import Cold

# Launchers' variables, which workers do not get: one that loads MPI would take itself for its rank.
OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "HOROVOD_")
IN_WORKERS = {
    "MPI4PY_RC_INITIALIZE": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Launchers and schedulers send these to all processes of a rank. Only the rank is to act on them.
OF_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SOCKET_BYTES = 107  # of the longest name that the kernel gives a socket
GUARD = re.compile(r"^if\b.*__name__.*__main__", re.MULTILINE)

_state: Callable[[], str] | None = None
"""Returns why the fork server cannot be used, or "" if it can. None if it was not started."""


def start_workers() -> None:
    """Start the process that worker processes are forked from; call it before MPI starts.

    Every rank calls it, before `hpc_train.run` and before `mpi4py.MPI` is imported, in the part of
    the script below `if __name__ == "__main__":`. It returns at once. A second call does nothing. A
    call in a worker does nothing either, as workers import the script. The workers run on the cores
    that the rank has at the time of the call.

    Raises:
        UserError: MPI runs already, the script has no line `if __name__ == "__main__":`, or TMPDIR
            is too long for a socket.
    """
    if _in_worker() or (_state is not None and not _state()):
        return
    if mpi_runs():
        raise UserError(
            "MPI runs already, and a process that uses MPI must not start others",
            "call hpc_train.start_workers() before hpc_train.run(), hvd.init(), and the import of "
            "mpi4py.MPI",
        )
    _check_guard()
    try:
        _start_warm()
    except Cold:
        _start_cold()


def why_no_processes() -> str:
    """The reason why worker processes cannot read samples; "" if they can.

    In a rank that was started warm, this call starts the process that forks the workers.
    """
    if _in_worker():
        return "this is a worker itself"
    from torch import multiprocessing as of_torch  # here, as who only asks for a place has no torch

    if of_torch.get_sharing_strategy() != "file_descriptor":
        return "torch's sharing strategy file_system would start a process"
    if _state is None:
        try:
            _check_guard()
            _start_warm()
        except (Cold, UserError) as error:
            return f"hpc_train.start_workers() was not called before MPI started, and {error}"
    assert _state is not None
    return _state()


def _start_cold() -> None:
    """Start the fork server as a child of this process."""
    forkserver.set_forkserver_preload(["numpy", "torch", "hpc_train.data.workers"])
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, OF_RANK)
    try:
        with _environment_of_workers():
            resource_tracker.ensure_running()
            # ensure_running has unblocked them.
            signal.pthread_sigmask(signal.SIG_BLOCK, OF_RANK)
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker

    def state() -> str:
        with suppress(ChildProcessError):
            ended = os.waitid(
                os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            )
            if ended is None:
                return "" if tracker._check_alive() else "resource_tracker has ended"
        return "the process that forks them has ended; its output says why"

    _use(state)


def _start_warm() -> None:
    """Ask the server that has forked this rank to fork Python's fork server, too.

    Raises:
        Cold: no server has forked this rank, or the server does not fork another process.
        UserError: TMPDIR is too long, with or without such a server.
    """
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    with ExitStack() as lent, ExitStack() as kept:
        try:
            alive, stays_alive = _pipe(lent, kept)
            numbers = [alive]
            if new_tracker := tracker._fd is None:
                tracked, to_tracker = _pipe(lent, kept)
                numbers.append(tracked)
            listener = lent.enter_context(socket.socket(socket.AF_UNIX))
            address = _socket_address()
            listener.bind(address)
            Path(address).chmod(0o600)
            listener.listen()
            numbers.insert(0, listener.fileno())
            forked = beside.start_beside(
                [__file__, *map(str, numbers)],
                mask={*OF_RANK},
                numbers=numbers,
                environ=of_workers(os.environb),
            )
        except OSError as error:
            raise Cold(str(error)) from None
        kept.pop_all()
    server._forkserver_address, server._forkserver_alive_fd = address, stays_alive
    if new_tracker:
        tracker._fd = to_tracker

    def state() -> str:
        ended = select.select([forked], [], [], 0)[0]
        return "the process that forks them has ended; its output says why" if ended else ""

    _use(state)


def _socket_address() -> str:
    address: str = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    if len(os.fsencode(address)) > SOCKET_BYTES:
        raise UserError(
            f"TMPDIR {tempfile.gettempdir()} is too long for a socket",
            "set it to a shorter one, such as /tmp",
        )
    return address


def _pipe(lent: ExitStack, kept: ExitStack) -> tuple[int, int]:
    """A pipe. The stack `lent` closes its reading end, the stack `kept` its writing end."""
    reading, writing = os.pipe()
    lent.callback(os.close, reading)
    kept.callback(os.close, writing)
    return reading, writing


def _serve(listener: int, alive: int, tracked: int | None = None) -> None:
    """Be the fork server that `_start_warm` has asked for, and start a resource tracker."""
    if tracked is not None and os.fork() == 0:
        try:
            os.setpgid(0, 0)  # it outlives workers that are killed, and removes their semaphores
            os.close(listener)
            os.close(alive)
            resource_tracker.main(tracked)
        finally:
            os._exit(0)
    if tracked is not None:
        os.close(tracked)
    forkserver.main(listener, alive, ["hpc_train.data.workers"])


def _use(state: Callable[[], str]) -> None:
    """Make Python use the helper processes that run; by itself it would fork new ones."""
    global _state
    _state = state

    def ensure_running() -> None:
        if why := state():
            raise OSError(why)

    helpers: tuple[Any, ...] = (forkserver._forkserver, resource_tracker._resource_tracker)
    for helper in helpers:
        helper.ensure_running = helper._launch = ensure_running


def _in_worker() -> bool:
    importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return importing or multiprocessing.parent_process() is not None


def mpi_runs() -> bool:
    """Whether this process uses MPI, so that it must not start others."""
    mpi = sys.modules.get("mpi4py.MPI")
    horovod = sys.modules.get("horovod.torch")
    return bool((mpi and mpi.Is_initialized()) or (horovod and horovod.is_initialized()))


def _check_guard() -> None:
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", "") or ""
    file = getattr(main, "__file__", None)
    if file is None or name.endswith("__main__"):
        return  # workers import neither a package's __main__ nor a program without a file
    with suppress(OSError, UnicodeDecodeError):
        if not GUARD.search(Path(file).read_text(encoding="utf-8")):
            raise UserError(
                f'workers import {file}, and it has no line `if __name__ == "__main__":`',
                "put the code of the script below such a line",
            )


def of_workers(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The environment of workers, made from the rank's."""
    names = tuple(map(os.fsencode, OF_LAUNCHERS))
    kept = {name: value for name, value in environ.items() if not name.startswith(names)}
    return kept | {os.fsencode(n): os.fsencode(value) for n, value in IN_WORKERS.items()}


@contextmanager
def _environment_of_workers() -> Iterator[None]:
    mine = dict(os.environb)
    for name in mine.keys() - of_workers(mine).keys():
        del os.environb[name]
    os.environ.update(IN_WORKERS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environb.update(mine)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
