"""The fork server of a node: it imports everything once, and forks a rank for each stand-in.

It has one thread, and loads neither MPI nor a GPU's driver. It kills a rank when the connection to
its stand-in closes. If the server is killed, the kernel kills the ranks. The server ends when all
ranks have ended, at once or after it has waited for another start.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import marshal
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import FINAL_CODES
from hpc_train.warm import meeting, rank
from hpc_train.warm.key import LINGER, LOAD, packed

# The libraries that ranks of this package load. mpi4py.MPI and Horovod are not among them, because
# MPI has to be loaded with the variables of its own rank.
LIBRARIES = (
    *("torch", "numpy", "h5py", "mpi4py", "safetensors", "xxhash", "psutil", "yaml", "jinja2"),
    *("jsonargparse", "docstring_parser", "typeshed_client", "rich.console", "rich.progress"),
    *("torch.utils.data", "tokenizers"),
)
PROGRAM = (
    *("hpc_train.cli.train", "hpc_train.training.gpt", "hpc_train.models.gpt.module"),
    "hpc_train.models.llama.module",
    *("hpc_train.training.tables", "hpc_train.models.tabular.transformer"),
)
BEFORE = 20.0  # seconds to wait for the first stand-in
AFTER = 1.0  # seconds to wait for another one of the same start
PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)


@dataclass
class Peer:
    """A stand-in's connection, and the process number of the rank that was forked for it.

    Or a rank's connection, and the process that was forked beside the rank.
    """

    connection: socket.socket
    pid: int = 0
    beside: bool = False


def main() -> None:
    """Serve until all ranks have ended. In a fork, run the rank's program as a main program."""
    folder, alive, listening, *_ = sys.argv[1:]
    unfit = load_libraries(os.environ.get(LOAD, ""))
    server = Server(folder, int(alive), int(listening), unfit)
    request = server.serve()
    if request is None:
        meeting.clear(folder)
        return
    rank.run_rank(request)


def load_libraries(what: str) -> str:
    """Import what ranks need. Returns why this process must not be forked; "" if it may be."""
    for name in LIBRARIES if what == "libraries" else (*LIBRARIES, *PROGRAM):
        with suppress(ImportError):
            importlib.import_module(name)
    if what != "libraries":
        importlib.import_module("hpc_train.config.file").config_parser(documented=False)
    gc.collect()
    gc.freeze()  # otherwise the collector would write to pages that forks share
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        return f"loading the libraries has started {threads - 1} threads"
    if "mpi4py.MPI" in sys.modules:
        return "loading the libraries has loaded MPI"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "loading the libraries has started CUDA"
    return ""


class Server:
    """Accepts stand-ins, forks ranks, and tells the stand-ins how their ranks have ended.

    Args:
        folder: the folder of the socket.
        alive: descriptor of the file `alive`. This process holds its lock as long as it lives.
        listening: descriptor of the socket.
        unfit: why no rank may be forked; "" if ranks may be forked.
    """

    def __init__(self, folder: str, alive: int, listening: int, unfit: str) -> None:
        self.folder, self.alive, self.unfit = folder, alive, unfit
        self.listening = socket.socket(fileno=listening)
        self.listening.setblocking(False)
        os.set_inheritable(alive, False)
        self.peers: dict[int, Peer] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listening, selectors.EVENT_READ)
        self.woken, waking = os.pipe()
        for end in (self.woken, waking):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        self.selector.register(self.woken, selectors.EVENT_READ)
        self._waking = waking
        self._linger = float(os.environ.get(LINGER) or 0)
        self._leaving = False
        self._until = time.monotonic() + max(BEFORE, self._linger)

    def serve(self) -> rank.ForkRequest | None:
        """Serve until nobody is left, and return None. In a fork, return the rank's request."""
        while self.peers or time.monotonic() < self._until:
            for key, _ in self.selector.select(None if self.peers else 0.2):
                if key.fileobj is self.listening:
                    self._accept()
                elif key.fd == self.woken:
                    with suppress(BlockingIOError):
                        os.read(self.woken, 4096)
                elif (peer := self.peers.get(key.fd)) and (request := self._hear(peer)):
                    return request
            self._reap()
            if not self.peers and time.monotonic() >= self._until:
                with suppress(FileNotFoundError):
                    Path(self.folder, "socket").unlink()  # from here on nobody can connect
                self._accept()  # take those who have connected before
        return None

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self.listening.accept()
                peer = struct.unpack(
                    "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                )
                if peer[1] != os.getuid():
                    connection.close()
                    continue
                connection.setblocking(False)
                self.peers[connection.fileno()] = Peer(connection)
                self.selector.register(connection, selectors.EVENT_READ)

    def _hear(self, peer: Peer) -> rank.ForkRequest | None:
        """Take a stand-in's message. In the fork that it asks for, return its request."""
        try:
            data, descriptors, _, _ = socket.recv_fds(peer.connection, 1 << 20, 256)
        except BlockingIOError:  # its descriptor has the number of one that has just closed
            return None
        except OSError:
            data, descriptors = b"", []
        if not data:  # the stand-in has ended, so kill its rank, which is not reaped yet
            if peer.pid:
                os.kill(peer.pid, signal.SIGKILL)  # the rank may not have its own group yet
                _kill_group(peer.pid)
                self.selector.unregister(peer.connection)
            else:
                self._drop(peer)
        elif peer.pid:
            os.kill(peer.pid, marshal.loads(data))
        elif data == packed("leave"):
            self._leaving, self._until = True, 0.0
        elif self.unfit:
            _refuse(peer, descriptors, self.unfit)
        else:
            return self._fork(peer, rank.ForkRequest(marshal.loads(data), descriptors))
        return None

    def _fork(self, peer: Peer, request: rank.ForkRequest) -> rank.ForkRequest | None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # there are too many processes, or there is too little memory
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            _refuse(peer, request.descriptors, f"the fork server cannot fork: {error.strerror}")
            return None
        if pid:
            peer.pid, peer.beside = pid, request.values["beside"]
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for descriptor in request.descriptors:
                os.close(descriptor)
            return None
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        connection = self._leave(peer.connection, max(request.values["descriptors"], default=2) + 1)
        try:
            rank.become(request, self.folder)
        except Exception as error:  # noqa: BLE001  # after any error the rank starts cold
            connection.send(packed({"cold": f"the fork cannot become this rank: {error!r}"}))
            os._exit(0)
        connection.send(packed({"cold": "", "group": os.getpid()}))
        connection.close()
        return request

    def _leave(self, kept: socket.socket, above: int) -> socket.socket:
        """Close the server's descriptors in a fork.

        Returns:
            The connection to the rank's stand-in, under a number that the rank does not need.
        """
        moved = socket.socket(fileno=fcntl.fcntl(kept.fileno(), fcntl.F_DUPFD_CLOEXEC, above))
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        self.listening.close()
        for number in (self.alive, self.woken, self._waking):
            os.close(number)
        for peer in self.peers.values():
            peer.connection.close()
        self.peers = {}
        return moved

    def _reap(self) -> None:
        """Tell stand-ins how their ranks have ended."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        if status:  # launchers, too, kill what a failed rank has left running
            _kill_group(pid)
        for peer in self._with(pid):
            with suppress(OSError):
                peer.connection.send(packed({"status": status}))
            self._drop(peer)
            if peer.beside:
                return
        final = os.WIFEXITED(status) and os.WEXITSTATUS(status) in FINAL_CODES
        shared = bool(os.environ.get(LOAD))  # several jobs share the server, and others may follow
        wait = AFTER if final and not shared else max(AFTER, self._linger)
        self._until = 0.0 if self._leaving else time.monotonic() + wait

    def _with(self, pid: int) -> Iterable[Peer]:
        return [peer for peer in self.peers.values() if peer.pid == pid]

    def _drop(self, peer: Peer) -> None:
        number = peer.connection.fileno()
        with suppress(KeyError):
            self.selector.unregister(peer.connection)
        del self.peers[number]
        peer.connection.close()


def _refuse(peer: Peer, descriptors: Iterable[int], why: str) -> None:
    """Have a stand-in start its rank cold."""
    with suppress(OSError):  # it has ended
        peer.connection.send(packed({"cold": why}))
    for descriptor in descriptors:
        os.close(descriptor)


def _kill_group(pid: int) -> None:
    """Kill a rank and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
