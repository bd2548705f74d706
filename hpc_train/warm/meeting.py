"""The fork server of this node: found by its name, or started by whoever comes first."""

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

ROOTS = ("/dev/shm", "/tmp")  # of a node alone, and short: a socket's path has at most 107 bytes
LETS_GO = 1.0  # seconds in which the kernel releases the lock of a process that was killed
PATH = 107  # bytes of a socket's path (unix(7))
PADDING = 4096  # bytes of the server's command line, in which a rank writes its own


class Cold(Exception):
    """Why this rank starts cold."""


def connect_server() -> socket.socket:
    """A connection to the node's server, which is started if there is none.

    Raises:
        Cold: there can be none, or it is of another key.
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
                pass  # a server that left has taken the folder with it
            time.sleep(0.005)
    except (OSError, StopIteration) as error:
        raise Cold(str(error) or "no folder in memory can be written") from None
    raise Cold("no server came up")


def name_here() -> str:
    """The name of this node's server; by default the job's.

    PMIx tells the ranks which job is theirs. Without it, what started them is their parent.
    """
    if name := os.environ.get(WARM):
        return name
    if space := os.environ.get("PMIX_NAMESPACE"):
        return f"pmix-{short_name(space)}"
    number = os.getppid()
    begun = text_of(f"/proc/{number}/stat").rpartition(")")[2].split()[19]
    return f"parent-{number}-{begun}"


def short_name(text: str) -> str:
    """A name for a text of any length."""
    return f"{zlib.crc32(text.encode(errors='surrogateescape')):08x}"


def folder_of(name: str) -> str:
    """Where the server of this name has its folder, below one of the user's."""
    return f"{folder_of_all()}/{name}"


def folder_of_all() -> str:
    """Where this user's servers have their folders."""
    root = next(root for root in ROOTS if os.access(root, os.W_OK | os.X_OK))
    return f"{root}/hpc-train-{os.getuid()}"


def private_folder(name: str) -> str:
    """Make the folder of a server, which this user alone can enter.

    Raises:
        Cold: somebody else has made it, or its name is too long.
        OSError: it cannot be made.
    """
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
    """A connection to the server in a folder; None if there is none yet.

    Raises:
        Cold: it is of another key.
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
        raise Cold(f"the server is of another {difference(theirs, key)}")
    return server


def first(folder: str, key: bytes) -> socket.socket | None:
    """Start the folder's server, and connect to it; None if another process is at it.

    The lock on the file `alive` is the server's for as long as it lives.
    """
    alive = os.open(f"{folder}/alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not _still(folder, alive):
            return None  # the last server took the folder with it
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
    """Have this node's server of a name end when its ranks have, without waiting for others."""
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
    """Remove the folders of servers that were killed, with the exception of one."""
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
            pass  # its server lives
        finally:
            os.close(alive)


def _remove_empty(folder: str) -> None:
    """Remove a folder that its maker left at once; one that has just made it makes it again."""
    try:
        os.rmdir(folder)
    except OSError:
        pass


def clear_killed() -> None:
    """Remove the folder of this node's server, which was killed a moment ago."""
    folder, end = folder_of(name_here()), time.monotonic() + LETS_GO
    sweep()
    while os.path.exists(folder) and time.monotonic() < end:
        time.sleep(0.01)
        sweep()


def clear(folder: str) -> None:
    """Remove a server's folder; the file that holds its lock goes last."""
    try:
        # Besides the socket and the key, memory that killed ranks have shared.
        others = [name for name in os.listdir(folder) if name != "alive"]
        for name in ("socket", *others, "alive"):
            _unlink(f"{folder}/{name}")
        os.rmdir(folder)
        os.rmdir(os.path.dirname(folder))
    except OSError:
        pass  # the next one has come already


SERVE = """import sys
if not sys.flags.safe_path:
    del sys.path[0]
from hpc_train.warm.server import main
main()"""


def spawn(folder: str, alive: int, listening: int) -> None:
    """Start the server as nobody's child, so that no launcher ends it with a rank."""
    if os.fork():
        os.wait()
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Under no rank's binding; the kernel keeps it to the cgroup's processors.
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
        # Threads that a library starts while it is loaded would not be in the forks.
        environ = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        words = [sys.executable, "-c", SERVE, folder, *map(str, lent), "-" * PADDING]
        os.execve(sys.executable, words, environ)
    finally:
        os._exit(1)


def descriptors() -> list[int]:
    """The open ones of this process."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if is_open(number)]


def is_open(number: int) -> bool:
    """Whether a descriptor is open."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
