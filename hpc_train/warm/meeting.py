"""Find the fork server of this node by its name. The first process that needs it starts it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import sys
import time
import zlib

from hpc_train.warm.key import WARM, difference, key_of, packed, text_of

ROOTS = ("/dev/shm", "/tmp")  # each node has its own, and they are short: see PATH
LETS_GO = 1.0  # seconds to wait until the kernel releases the lock of a killed process
PATH = 107  # most bytes of a socket's path (unix(7))
# The signals that others send. The rest cannot be caught, or come from the process itself.
PASSED_SIGNALS = signal.valid_signals() - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTTIN),
    *(signal.SIGTTOU, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
}
PADDING = 4096  # bytes of the server's command line, over which a rank writes its own


class Cold(Exception):
    """This rank has to start cold. The message says why."""


def connect_server() -> socket.socket:
    """Connect to the node's server. Start it first if there is none.

    Raises:
        Cold: no server can be started, or it has another key.
    """
    try:
        key = packed(key_of(os.environ))
        name = name_here()
        for _ in range(1000):
            try:
                folder = private_folder(name)
                if server := reached(folder, key) or first(folder, key):
                    return server
            except FileNotFoundError:
                pass  # a server that ended has removed the folder
            time.sleep(0.005)
    except (OSError, StopIteration) as error:
        raise Cold(str(error) or "no folder in memory can be written") from None
    raise Cold("no server came up")


def name_here() -> str:
    """The name of this node's server. By default it names the job.

    A job is known by its PMIx namespace. Without PMIx it is known by the process that has started
    the ranks, which is their parent.
    """
    if name := os.environ.get(WARM):
        return name
    if space := os.environ.get("PMIX_NAMESPACE"):
        return f"pmix-{short_name(space)}"
    number = os.getppid()
    begun = text_of(f"/proc/{number}/stat").rpartition(")")[2].split()[19]
    return f"parent-{number}-{begun}"


def short_name(text: str) -> str:
    """A short name for a text of any length."""
    return f"{zlib.crc32(text.encode(errors='surrogateescape')):08x}"


def folder_of(name: str) -> str:
    """The folder of the server with this name, inside the user's folder."""
    return f"{folder_of_all()}/{name}"


def folder_of_all() -> str:
    """The user's folder, which has the folders of all of the user's servers."""
    root = next(root for root in ROOTS if os.access(root, os.W_OK | os.X_OK))
    return f"{root}/hpc-train-{os.getuid()}"


def private_folder(name: str) -> str:
    """Make the folder of a server. Only this user can enter it.

    Raises:
        Cold: the folder belongs to somebody else or is open to others, or its name is no name of a
            folder, or too long.
        OSError: it cannot be made.
    """
    if "/" in name or name in (".", ".."):
        raise Cold(f"{WARM} is {name}, which is a path: give a name")  # no sweep would clear it
    made = folder_of(name)
    if len(os.fsencode(f"{made}/socket")) > PATH:
        raise Cold(f"{WARM} is too long for the path of a socket")
    for folder in (os.path.dirname(made), made):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            found = os.lstat(folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise Cold(f"{folder} is not this user's folder") from None
            if stat.S_IMODE(found.st_mode) != 0o700:
                raise Cold(f"{folder} is open to others") from None
    return made


def reached(folder: str, key: bytes) -> socket.socket | None:
    """Connect to the server in a folder. Returns None if there is no server yet.

    Raises:
        Cold: the server has another key.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(f"{folder}/socket")
        with open(f"{folder}/key", "rb") as file:
            theirs = file.read()
    except (FileNotFoundError, ConnectionRefusedError):
        server.close()
        return None
    if theirs != key:
        server.close()
        raise Cold(f"the server differs from it in {difference(theirs, key)}")
    return server


def first(folder: str, key: bytes) -> socket.socket | None:
    """Start the folder's server, and connect to it. Returns None if another process is starting it.

    The server holds the lock on the file `alive` as long as it lives.
    """
    alive = os.open(f"{folder}/alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not _still(folder, alive):
            return None  # the last server has removed the folder
        sweep(folder)
        _unlink(f"{folder}/socket")
        with open(f"{folder}/key", "wb") as file:
            file.write(key)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(f"{folder}/socket")
            listening.listen(4096)
            spawn(folder, alive, listening.fileno())
    finally:
        os.close(alive)
    return reached(folder, key)


def dismiss(name: str) -> None:
    """Tell this node's server of a name to end with its ranks, and not to wait for other ranks."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(f"{folder_of(name)}/socket")
            server.send(packed("leave"))
    except (OSError, StopIteration):
        pass  # there is none


def _still(folder: str, descriptor: int) -> bool:
    try:
        return os.stat(f"{folder}/alive").st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def sweep(but: str = "") -> None:
    """Remove the folders of servers that were killed, except the folder `but`."""
    try:
        own = folder_of_all()
        folders = [f"{own}/{name}" for name in os.listdir(own)]
    except (OSError, StopIteration):
        return  # there are none
    for folder in folders:
        if folder == but:
            continue
        try:
            alive = os.open(f"{folder}/alive", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            _remove_empty(folder)
            continue
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _still(folder, alive):
                clear(folder)
        except OSError:
            pass  # its server is alive
        finally:
            os.close(alive)


def _remove_empty(folder: str) -> None:
    """Remove a folder that nobody uses. A process that has just made it will make it again."""
    try:
        os.rmdir(folder)
    except OSError:
        pass


def clear_killed() -> None:
    """Remove the folder of this node's server, which has just been killed."""
    folder, end = folder_of(name_here()), time.monotonic() + LETS_GO
    sweep()
    while os.path.exists(folder) and time.monotonic() < end:
        time.sleep(0.01)
        sweep()


def clear(folder: str) -> None:
    """Remove a server's folder. The file with its lock is removed last."""
    try:
        # Besides socket and key there can be shared memory that killed ranks have left.
        others = [name for name in os.listdir(folder) if name != "alive"]
        for name in ("socket", *others, "alive"):
            _unlink(f"{folder}/{name}")
        os.rmdir(folder)
        os.rmdir(os.path.dirname(folder))
    except OSError:
        pass  # the next server uses the folder already


SERVE = """import sys
if not sys.flags.safe_path:
    del sys.path[0]
from hpc_train.warm.server import main
main()"""


def spawn(folder: str, alive: int, listening: int) -> None:
    """Start the server detached from this process, so that no launcher ends it with a rank.

    It ignores the signals that stop a job, which may be sent to all processes of a cgroup or of a
    name. Its end would be that of its ranks, in the middle of their checkpoint.
    """
    if os.fork():
        os.wait()
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        for one in PASSED_SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # This drops the rank's binding. The kernel limits it to the cgroup's processors.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        lent = [os.dup(alive), os.dup(listening)]
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        for descriptor in descriptors():
            if descriptor in lent:
                os.set_inheritable(descriptor, True)
            elif descriptor > 2:
                os.close(descriptor)
        # OpenBLAS would start threads while it is loaded, and forks do not inherit threads.
        environ = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        words = [sys.executable, "-c", SERVE, folder, *map(str, lent), "-" * PADDING]
        os.execve(sys.executable, words, environ)
    finally:
        os._exit(1)


def descriptors() -> list[int]:
    """The open descriptors of this process."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if is_open(number)]


def is_open(number: int) -> bool:
    """Whether a descriptor is open."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
