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
import time
from collections.abc import Mapping, Sequence

from hpc_train.warm.key import WARM, WHY, binding_variable, is_off, packed, text_of
from hpc_train.warm.meeting import Cold, clear_killed, connect_server, descriptors

# Those that a process is sent by others. The rest cannot be caught, or tell it of itself.
PASSED_SIGNALS = signal.valid_signals() - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTTIN),
    *(signal.SIGTTOU, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
}
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Our own program asks for these itself, once it has loaded its libraries.
HELD = (*END_SIGNALS[:3], signal.SIGUSR1, signal.SIGUSR2)
SERVER_PATIENCE = 5.0  # seconds that a signal to end waits for a server that does not answer
REQUEST_BYTES = 1 << 18  # bytes of a request; a larger environment starts cold
DESCRIPTORS = 250  # that one message may carry (SCM_MAX_FD is 253)

forked_by = ""
"""The folder of the server that has forked this process, which is a rank then; "" if none has."""


def command(program: Sequence[str]) -> list[str]:
    """The words that start a program warm, where `python` with the program starts it cold."""
    here = os.path.dirname(os.path.realpath(__file__))
    return [sys.executable, "-S", "-E", f"{here}/__main__.py", *program]


def main() -> int:
    """Be the stand-in of a rank that runs the arguments; a cold start if there is no server."""
    program = sys.argv[1:]
    if not program:
        print("usage: __main__.py (-m MODULE | SCRIPT) ARGUMENT...", file=sys.stderr)
        return 2
    code = start_stand_in(program, first_on_path(program))
    if code is None:
        os.environ[WARM] = "off"  # it is not tried twice
        os.execv(sys.executable, [sys.executable, *program])
    return code


def first_on_path(program: Sequence[str]) -> str:
    """What Python puts first on sys.path for a program."""
    return os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))


def start_stand_in(program: Sequence[str], path: str) -> int | None:
    """Have a fork of the node's server run a program; wait for its end.

    Args:
        program: -m and a module, or a script, with arguments.
        path: first entry of sys.path.

    Returns:
        Its exit code; None: it has to start cold. If a signal ended it, that signal ends this
        process, too.
    """
    if forked_by or is_off(os.environ):
        return None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_SIGNALS)  # nothing is lost from here on
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
    return end_as(wait(server, group))


def check_program(program: Sequence[str]) -> None:
    """Leave to Python what a fork cannot do as well.

    Raises:
        Cold: naming it.
    """
    if name := binding_variable(os.environ):
        raise Cold(f"{name} binds threads to processors that a rank does not have yet")
    if program[0] == "-m" and len(program) == 1:
        raise Cold("no module is named")
    if program[0] != "-m" and not os.path.isfile(program[0]):
        raise Cold(f"{program[0]} is no file")


def inherited(server: socket.socket) -> list[int]:
    """The descriptors of this process that a program which it executes would have."""
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
    """Send the server all that makes a process like this one of its fork.

    Args:
        server: the connection to it.
        program: -m and a module, or a script, with arguments.
        path: first entry of sys.path.
        mask: signals that are blocked in the fork.
        numbers: descriptors that it gets, under the same numbers.
        environ: its environment variables.
        beside: it is no rank, but a process beside one.

    Raises:
        Cold: too many descriptors are open.
        OSError: it is too much, or the server is gone.
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
    """The mask of new files' modes, read without a moment in which it is another one."""
    line = next(line for line in text_of("/proc/self/status").splitlines() if "Umask:" in line)
    return int(line.split()[1], 8)


def started(server: socket.socket) -> int:
    """Wait until the rank runs; returns its process group.

    Raises:
        Cold: the server does not take it, has ended, or does not answer a process that is to end.
    """
    asked = None
    while not select.select([server.fileno()], [], [], 0.2)[0]:
        if signal.sigpending() & {*END_SIGNALS}:
            asked = asked or time.monotonic()
            if time.monotonic() - asked > SERVER_PATIENCE:
                raise Cold("it is asked to end, and the server does not answer")
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
    """Pass signals on until the rank ends; returns its status as `os.waitpid` gives it.

    They are blocked, and taken one by one: a handler might come between two of our calls.

    Args:
        server: the connection to it.
        group: the rank's process group, whose processes do not outlive the server either.
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
            pass  # it had none
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
