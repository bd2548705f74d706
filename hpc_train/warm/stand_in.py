"""The process that a launcher starts for a rank: the fork server of its node makes the rank.

It hands over its environment, directory, descriptors and limits, passes signals on, and ends as the
rank ends. Launchers run this file by `python -S -E`, which starts in a tenth of the time of a full
interpreter: it imports the standard library alone, and nothing of this package.

    python -S -E stand_in.py (-m MODULE | SCRIPT) ARGUMENT...
"""

from __future__ import annotations

import fcntl
import marshal
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

# Variables are of three kinds. These are read by libraries while they are loaded, so they are part
# of the server's key: a rank with another value starts cold.
READ_AT_LOAD = (
    *("ATEN_", "CUDA_", "CUBLAS_", "CUDNN_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "HDF5_", "KMP_"),
    *("LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NPY_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_"),
    *("PYTHON", "PYTORCH_", "TORCH_", "VECLIB_"),
)
# Of those, drivers read these when they are first used, which is after the fork.
READ_LATER = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
# These are for the server alone.
# All others, the launcher's and the user's own, are set in the fork.
WARM = "HPC_TRAIN_WARM"  # "off", or the name of the server that several starts share
LINGER = "HPC_TRAIN_WARM_LINGER"  # seconds that a server waits for another start
LOAD = "HPC_TRAIN_WARM_LOAD"  # "program", or "libraries" alone
WHY = "HPC_TRAIN_WARM_WHY"  # set: a rank that starts cold prints the reason

SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGQUIT, signal.SIGXCPU, signal.SIGTSTP, signal.SIGCONT),
)
HELD = SIGNALS[:5]  # our own program asks for them itself, once it has loaded its libraries
SPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
ROOTS = ("/dev/shm", "/tmp")  # of a node alone, and short: a socket's path has at most 107 bytes
MESSAGE = 1 << 18  # bytes of a request; a larger environment starts cold
DESCRIPTORS = 250  # that one message may carry (SCM_MAX_FD is 253)
PADDING = 4096  # bytes of the server's command line, in which a rank writes its own


forked = False
"""Whether a server has forked this process: then it is the rank, and asks for no other fork."""


class Cold(Exception):
    """Why this rank starts cold."""


def main() -> int:
    """Be the stand-in of a rank that runs the arguments; a cold start if there is no server."""
    program = sys.argv[1:]
    code = start(program, first_on_path(program))
    if code is None:
        os.environ[WARM] = "off"  # it is not tried twice
        os.execv(sys.executable, [sys.executable, *program])
    return code


def command(program: Sequence[str]) -> list[str]:
    """The words that start a program warm, where `python` with the program starts it cold."""
    return [sys.executable, "-S", "-E", os.path.realpath(__file__), *program]


def first_on_path(program: Sequence[str]) -> str:
    """What Python puts first on sys.path for a program."""
    return os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))


def start(program: Sequence[str], path: str) -> int | None:
    """Have a fork of the node's server run a program; wait for its end.

    Args:
        program: -m and a module, or a script, with arguments.
        path: first entry of sys.path.

    Returns:
        Its exit code; None: it has to start cold. If a signal ended it, that signal ends this
        process, too.
    """
    if forked or os.environ.get(WARM) == "off":
        return None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # nothing is lost from here on
    try:
        server = connect()
        try:
            held = HELD if list(program[:3]) == ["-m", "hpc_train", "train"] else ()
            hand_over(server, program, path, {*map(int, mask), *map(int, held)})
            started(server)
        except (OSError, ValueError) as error:
            server.close()
            raise Cold(str(error)) from None
    except Cold as reason:
        if os.environ.get(WHY):
            print(f"hpc-train: a rank starts cold: {reason}", file=sys.stderr)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None
    return end_as(wait(server))


# --- The server of this node: found, or started by whoever comes first


def connect() -> socket.socket:
    """A connection to the node's server, which is started if there is none.

    Raises:
        Cold: there can be none, or it is of another key.
    """
    try:
        key = packed(key_of(os.environ))
        name = os.environ.get(WARM) or parent()
        for _ in range(1000):
            try:
                folder = private_folder(name)
                if server := reached(folder, key) or first(folder, key):
                    return server
            except FileNotFoundError:
                pass  # a server that left has taken the folder with it
            time.sleep(0.005)
    except OSError as error:
        raise Cold(str(error)) from None
    raise Cold("no server came up")


def packed(value: Any) -> bytes:
    """A value as bytes: equal values give equal ones, which newer formats do not promise."""
    return marshal.dumps(value, 2)


def key_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """What ranks of one server have in common."""
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    packages = [f"{prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"]
    packages += _folders(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    variables = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(READ_AT_LOAD) and name not in READ_LATER
    }
    return {
        "variables": variables,
        "interpreter": (prefix, sys.version),
        "packages": [
            (name, os.stat(name).st_mtime_ns) for name in packages if os.path.exists(name)
        ],
        "user": (*os.getresuid(), *os.getresgid(), *sorted(os.getgroups())),
        "spaces": [os.readlink(f"/proc/self/ns/{name}") for name in SPACES],
        "cgroup": _text("/proc/self/cgroup"),
        "load": environ.get(LOAD, ""),
    }


def _folders(folder: str) -> list[str]:
    """The folders of this package, whose times change with the files that are put into them."""
    with os.scandir(folder) as entries:
        inside = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted([folder, *(path for path in inside if not path.endswith("__pycache__"))])


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def parent() -> str:
    """A name for the job on this node: its ranks have the launcher's process as their parent."""
    number = os.getppid()
    begun = _text(f"/proc/{number}/stat").rpartition(")")[2].split()[19]
    return f"parent-{number}-{begun}"


def private_folder(name: str) -> str:
    """A folder of this name that this user alone can enter.

    Raises:
        Cold: somebody else has made it.
        OSError: it cannot be made.
    """
    root = next(root for root in ROOTS if os.access(root, os.W_OK | os.X_OK))
    own = f"{root}/hpc-train-{os.getuid()}"
    for folder in (own, f"{own}/{name}"):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            found = os.lstat(folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise Cold(f"{folder} is not this user's folder") from None
            if stat.S_IMODE(found.st_mode) != 0o700:
                raise Cold(f"{folder} is open to others") from None
    return folder


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


def difference(theirs: bytes, key: bytes) -> str:
    """In what two keys differ."""
    one, other = marshal.loads(theirs), marshal.loads(key)
    return ", ".join(name for name in other if one.get(name) != other[name])


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
        sweep(os.path.dirname(folder), folder)
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
            server.connect(f"{private_folder(name)}/socket")
            server.send(packed("leave"))
    except (OSError, Cold):
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


def sweep(own: str, but: str = "") -> None:
    """Remove the folders of servers that were killed."""
    for name in os.listdir(own):
        folder = f"{own}/{name}"
        if folder == but:
            continue
        try:
            alive = os.open(f"{folder}/alive", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clear(folder)
        except OSError:
            pass
        finally:
            os.close(alive)


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


SERVE = "import sys; del sys.path[0]; from hpc_train.warm.server import main; main()"


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
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
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


# --- One rank


def descriptors() -> list[int]:
    """The open ones of this process."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if _is_open(number)]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def hand_over(server: socket.socket, program: Sequence[str], path: str, mask: set[int]) -> None:
    """Send the server all that makes this process a rank.

    Raises:
        OSError: it is too much, or the server is gone.
    """
    numbers = [
        n for n in descriptors() if n != server.fileno() and (n < 3 or os.get_inheritable(n))
    ]
    if len(numbers) > DESCRIPTORS:
        raise Cold(f"{len(numbers)} descriptors are open")
    umask = os.umask(0)
    os.umask(umask)
    limits = [n for n in dir(resource) if n.startswith("RLIMIT_")]
    ignored = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
    request = {
        "program": list(program),
        "path": path,
        "environ": dict(os.environb),
        "umask": umask,
        "limits": [
            (getattr(resource, n), *resource.getrlimit(getattr(resource, n))) for n in limits
        ],
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "memory": _text("/proc/self/oom_score_adj").strip(),
        "mask": sorted(int(number) for number in mask),
        "ignored": sorted(int(number) for number in ignored),
        "descriptors": numbers,
    }
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        socket.send_fds(server, [packed(request)], [here, *numbers])
    finally:
        os.close(here)


def started(server: socket.socket) -> None:
    """Wait until the rank runs.

    Raises:
        Cold: the server does not take it, or has ended.
    """
    answer = server.recv(MESSAGE)
    if not answer:
        raise Cold("the server has ended")
    if why := marshal.loads(answer).get("cold", "the fork has ended"):
        raise Cold(why)


def wait(server: socket.socket) -> int:
    """Pass signals on until the rank ends; returns its status as `os.waitpid` gives it.

    They are blocked, and taken one by one: a handler might come between two of our calls.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for one in SIGNALS:
        signal.signal(one, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while True:
        ready, _, _ = select.select([server.fileno(), reading], [], [])
        if reading in ready:
            for number in os.read(reading, 64):
                pass_on(server, number)
        if server.fileno() in ready:
            break
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.set_wakeup_fd(-1)
    try:
        answer = server.recv(MESSAGE)
    except ConnectionResetError:
        answer = b""
    if not answer:
        print("hpc-train: the fork server was killed, and this rank with it", file=sys.stderr)
        return int(signal.SIGKILL)
    status: int = marshal.loads(answer)["status"]
    return status


def pass_on(server: socket.socket, number: int) -> None:
    """Have the server send the rank a signal; both stop on Ctrl-Z."""
    stops = number == signal.SIGTSTP
    try:
        server.send(packed(int(signal.SIGSTOP if stops else number)))
    except OSError:
        return  # it has ended, which is read next
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)


def end_as(status: int) -> int:
    """End by the signal that ended the rank; else return its exit code."""
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank's own is the one to look at
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())
