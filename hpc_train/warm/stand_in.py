"""The process that a launcher starts for a rank. The fork server of its node forks the rank itself.

The stand-in hands over its environment, directory, descriptors and limits. It passes signals on to
the rank, and ends as the rank ends.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from hpc_train.warm.key import WARM, WHY, binding_variable, is_off, packed, text_of
from hpc_train.warm.meeting import (
    PASSED_SIGNALS,
    Cold,
    clear_killed,
    connect_server,
    descriptors,
)

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Blocked at first in our own program, which unblocks them once it has loaded its libraries.
HELD = (*END_SIGNALS[:2], signal.SIGUSR1, signal.SIGUSR2)
SERVER_PATIENCE = 5.0  # seconds that a signal to end waits for a server that does not answer
OWN_OPTIONS = ("-S", "-E")  # of Python, for a stand-in; its program starts without them
NO_MATTER = "uBq"  # options that a fork need not have; ranks never buffer their output (-u)
REQUEST_BYTES = 1 << 18  # largest request; a rank with a larger environment starts cold
DESCRIPTORS = 250  # most descriptors in one message (SCM_MAX_FD is 253)

forked_by = ""
"""In a rank that started warm, the folder of the server that has forked it; else ""."""


def command(program: Sequence[str]) -> list[str]:
    """The command line that starts a program warm. `python PROGRAM` starts it cold."""
    here = os.path.dirname(os.path.realpath(__file__))
    return [sys.executable, *OWN_OPTIONS, f"{here}/__main__.py", *program]


def main() -> int:
    """Be the stand-in of a rank that runs the arguments. Without a server, start it cold."""
    program = sys.argv[1:]
    if not program:
        print("usage: __main__.py (-m MODULE | SCRIPT) ARGUMENT...", file=sys.stderr)
        return 2
    code = start_stand_in(program, first_on_path(program))
    if code is None:
        os.environ[WARM] = "off"  # the cold start must not try again
        os.execv(sys.executable, [sys.executable, *program])
    return code


def first_on_path(program: Sequence[str]) -> str:
    """The entry that Python puts first on sys.path for a program."""
    return os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))


def start_stand_in(program: Sequence[str], path: str) -> int | None:
    """Run a program in a fork of the node's server, and wait for its end.

    Args:
        program: -m and a module, or a script, with arguments.
        path: first entry of sys.path.

    Returns:
        The program's exit code; None if it has to start cold. If a signal ends the program, the
        same signal ends this process.
    """
    if forked_by or is_off(os.environ):
        return None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_SIGNALS)  # `wait` will pass them on
    try:
        check_program(program)
        server = connect_server()
        try:
            held = HELD if list(program[:3]) == ["-m", "hpc_train", "train"] else ()
            hand_over(server, program, path, mask={*mask, *held}, numbers=inherited(server))
            group = started(server)
        except (OSError, ValueError) as error:
            server.close()
            raise Cold(str(error)) from None
    except Cold as reason:
        if os.environ.get(WHY):
            print(f"hpc-train: a rank starts cold: {reason}", file=sys.stderr)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return None
    with server:
        status = wait(server, group)
    return end_as(status)


def check_program(program: Sequence[str]) -> None:
    """Refuse programs that a fork cannot run as Python does.

    Raises:
        Cold: the program has to start cold; the message says why.
    """
    if name := binding_variable(os.environ):
        raise Cold(f"{name} binds threads to processors that a rank does not have yet")
    if option := interpreter_option(sys.orig_argv):
        raise Cold(f"the fork server's Python does not have the option {option}")
    if program[0] == "-m" and len(program) == 1:
        raise Cold("no module is named")
    if program[0] != "-m" and not os.path.isfile(program[0]):
        raise Cold(f"{program[0]} is not a file")


def interpreter_option(words: Sequence[str]) -> str:
    """The first option of Python on a command line that changes how programs run; "" if none."""
    if tuple(words[1:3]) == OWN_OPTIONS:
        return ""
    for word in words[1:]:
        if not word.startswith("-"):
            break
        for letter in word[1:]:
            if letter in "mc":  # the program follows
                return ""
            if letter not in NO_MATTER:
                return word
    return ""


def inherited(server: socket.socket) -> list[int]:
    """The descriptors that a program would inherit if this process executed it."""
    return [n for n in descriptors() if n != server.fileno() and (n < 3 or os.get_inheritable(n))]


def hand_over(
    server: socket.socket,
    program: Sequence[str],
    path: str,
    *,
    mask: set[int],
    numbers: Sequence[int],
    environ: Mapping[bytes, bytes] = os.environb,
    beside: bool = False,
) -> None:
    """Send the server a request for a fork with this process's settings and descriptors.

    Args:
        server: the connection to the server.
        program: -m and a module, or a script, with arguments.
        path: first entry of sys.path.
        mask: signals that are blocked in the fork.
        numbers: descriptors that the fork gets, under the same numbers.
        environ: the fork's environment variables.
        beside: whether the fork is a process beside a rank, and not a rank.

    Raises:
        Cold: too many descriptors are open.
        OSError: the request is too large, or the server has ended.
    """
    if len(numbers) > DESCRIPTORS:
        raise Cold(f"{len(numbers)} descriptors are open")
    limits = [n for n in dir(resource) if n.startswith("RLIMIT_")]
    ignored = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
    request = {
        "program": list(program),
        "path": path,
        "environ": dict(environ),
        "umask": umask(),
        "limits": [
            (getattr(resource, n), *resource.getrlimit(getattr(resource, n))) for n in limits
        ],
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "memory": text_of("/proc/self/oom_score_adj").strip(),
        "mask": sorted(int(number) for number in mask),
        "ignored": sorted(int(number) for number in ignored),
        "descriptors": list(numbers),
        "beside": beside,
    }
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        socket.send_fds(server, [packed(request)], [here, *numbers])
    finally:
        os.close(here)


def umask() -> int:
    """The umask, read from /proc, because os.umask would change it for a moment."""
    line = next(line for line in text_of("/proc/self/status").splitlines() if "Umask:" in line)
    return int(line.split()[1], 8)


def started(server: socket.socket) -> int:
    """Wait until the rank runs. Returns its process group.

    Raises:
        Cold: the server refuses the rank or has ended, or it did not answer and this process got a
            signal to end.
    """
    asked = None
    while not select.select([server.fileno()], [], [], 0.2)[0]:
        if signal.sigpending() & {*END_SIGNALS}:
            asked = asked or time.monotonic()
            if time.monotonic() - asked > SERVER_PATIENCE:
                raise Cold("it got a signal to end, and the server does not answer")
    try:
        answer = server.recv(REQUEST_BYTES)
    except ConnectionResetError:
        answer = b""
    if not answer:
        raise Cold("the server has ended before it could fork")
    told = marshal.loads(answer)
    if why := told.get("cold", "the fork has ended"):
        raise Cold(why)
    group: int = told["group"]
    return group


def wait(server: socket.socket, group: int) -> int:
    """Pass signals on until the rank ends. Returns its status in the form of `os.waitpid`.

    Handlers do nothing. Python writes the numbers of signals into a pipe, and this function reads
    them one by one. A handler that passed a signal on could run between any two calls.

    Args:
        server: the connection to the server.
        group: the rank's process group. Its processes are killed if the server is killed.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for one in PASSED_SIGNALS:
        signal.signal(one, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_SIGNALS)
    while True:
        ready, _, _ = select.select([server.fileno(), reading], [], [])
        if reading in ready:
            for number in os.read(reading, 64):
                pass_on(server, number)
        if server.fileno() in ready:
            break
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_SIGNALS)
    signal.set_wakeup_fd(-1)
    try:
        answer = server.recv(REQUEST_BYTES)
    except ConnectionResetError:
        answer = b""
    if not answer:
        print("hpc-train: the fork server was killed, and this rank with it", file=sys.stderr)
        try:
            os.killpg(group, signal.SIGKILL)  # the kernel has killed the rank, not its children
        except OSError:
            pass  # the rank had no children
        clear_killed()
        return int(signal.SIGKILL)
    status: int = marshal.loads(answer)["status"]
    return status


def pass_on(server: socket.socket, number: int) -> None:
    """Let the server send a signal to the rank. On Ctrl-Z both processes stop."""
    stops = number == signal.SIGTSTP
    try:
        server.send(packed(int(signal.SIGSTOP if stops else number)))
    except OSError:
        return  # the rank has ended; the next read tells so
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)


def end_as(status: int) -> int:
    """Return the rank's exit code. If a signal ended the rank, end this process by it, too."""
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the rank's core file is of use
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
