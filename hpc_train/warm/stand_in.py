"""The process that a launcher starts for a rank: the fork server of its node makes the rank.

It hands over its environment, directory, descriptors and limits, passes signals on, and ends as the
rank ends.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence

from hpc_train.warm.key import WARM, WHY, packed, text_of
from hpc_train.warm.meeting import Cold, clear_killed, connect, descriptors

SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGQUIT, signal.SIGXCPU, signal.SIGTSTP, signal.SIGCONT),
)
HELD = SIGNALS[:5]  # our own program asks for them itself, once it has loaded its libraries
MESSAGE = 1 << 18  # bytes of a request; a larger environment starts cold
DESCRIPTORS = 250  # that one message may carry (SCM_MAX_FD is 253)

forked = False
"""Whether a server has forked this process: then it is the rank, and asks for no other fork."""


def command(program: Sequence[str]) -> list[str]:
    """The words that start a program warm, where `python` with the program starts it cold."""
    here = os.path.dirname(os.path.realpath(__file__))
    return [sys.executable, "-S", "-E", f"{here}/__main__.py", *program]


def main() -> int:
    """Be the stand-in of a rank that runs the arguments; a cold start if there is no server."""
    program = sys.argv[1:]
    code = start(program, first_on_path(program))
    if code is None:
        os.environ[WARM] = "off"  # it is not tried twice
        os.execv(sys.executable, [sys.executable, *program])
    return code


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
        "memory": text_of("/proc/self/oom_score_adj").strip(),
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
        clear_killed()
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
