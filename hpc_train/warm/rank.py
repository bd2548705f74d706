"""Turn a fork into the process that a cold start would have made, and run its program."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import importlib
import importlib.machinery
import io
import os
import random
import re
import resource
import runpy
import signal
import sys
import threading
import time
import types
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hpc_train.warm import stand_in
from hpc_train.warm.meeting import PADDING, is_open

OWN_PACKAGE = "hpc_train"
# The folder in which Open MPI 4 puts memory that ranks share. It leaves files if ranks are killed.
SEGMENT_FOLDER = "OMPI_MCA_btl_vader_backing_directory"
# Open MPI's framework for shared memory always ends up with mmap. It tries the other kinds first,
# and leaves a file if it is killed meanwhile.
TRIED = "OMPI_MCA_shmem"


@dataclass
class ForkRequest:
    """The request of a stand-in, see `stand_in.hand_over`.

    Args:
        values: the fields of its message.
        descriptors: the descriptors that came with it. The first is its working directory.
    """

    values: dict[str, Any]
    descriptors: list[int]


def become(request: ForkRequest, folder: str) -> None:
    """Take over the rank's directory, descriptors, limits, environment and signals.

    Args:
        request: the request of the rank's stand-in.
        folder: the server's folder. It is removed with its files when the server ends.

    Raises:
        OSError: the kernel does not allow this process one of the settings, or a module that the
            server has loaded would be another one in a cold start.
    """
    stand_in.forked_by = folder
    values = request.values
    # A new process group, so that a signal to the rank's group does not reach the server. But the
    # session stays: Linux schedules sessions separately (sched(7), autogroup), and a rank that
    # waits could not yield to ranks of another session.
    os.setpgid(0, 0)
    here, *descriptors = request.descriptors
    os.fchdir(here)
    os.close(here)
    os.umask(values["umask"])
    for number, soft, hard in values["limits"]:
        if resource.getrlimit(number) != (soft, hard):
            resource.setrlimit(number, (soft, hard))
    os.sched_setaffinity(0, values["affinity"])
    if os.getpriority(os.PRIO_PROCESS, 0) != values["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, values["nice"])
    score = Path("/proc/self/oom_score_adj")
    if score.read_text(encoding="utf-8").strip() != values["memory"]:
        score.write_text(values["memory"], encoding="utf-8")
    place_descriptors(descriptors, values["descriptors"])
    os.environ.clear()
    os.environb.update(values["environ"])
    time.tzset()
    if hidden := hidden_by(values["path"]):
        raise OSError(f"{values['path']} has its own module {hidden}, but another one is loaded")
    if folder.startswith("/dev/shm"):
        os.environ.setdefault(SEGMENT_FOLDER, folder)
        os.environ.setdefault(TRIED, "mmap")
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = stream_of(name, number, mode)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    write_command_line([sys.executable, *values["program"]])
    differ()
    ignore(values["ignored"])
    signal.pthread_sigmask(signal.SIG_SETMASK, values["mask"])


def ignore(wanted: list[int]) -> None:
    """Ignore these signals and no others. The server may ignore others than this stand-in does."""
    for number in signal.valid_signals():
        ignored = signal.getsignal(number) is signal.SIG_IGN
        if number in wanted and not ignored:
            signal.signal(number, signal.SIG_IGN)
        elif ignored and number not in wanted:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def hidden_by(path: str) -> str:
    """The name of a loaded module that a cold start would load from this folder; "" if none is."""
    if sys.flags.safe_path:
        return ""
    loaded = {name for name in sys.modules if "." not in name}
    try:
        there = {name.partition(".")[0] for name in os.listdir(path)}
    except OSError:
        return ""
    for name in loaded & there - {"__main__"}:
        found = importlib.machinery.PathFinder.find_spec(name, [path])
        if not found or not found.has_location or not found.origin:
            continue  # for instance a folder of data
        own = getattr(sys.modules[name], "__file__", None)
        if os.path.realpath(found.origin) != os.path.realpath(own or ""):
            return name
    return ""


def place_descriptors(received: list[int], numbers: list[int]) -> None:
    """Move descriptors to the numbers that they have in the stand-in.

    Raises:
        OSError: this process uses one of the numbers.
    """
    above = max([*numbers, *received]) + 1
    high = []
    for descriptor in received:
        while is_open(above):
            above += 1
        os.dup2(descriptor, above)
        os.close(descriptor)
        high.append(above)
        above += 1
    for descriptor, number in zip(high, numbers, strict=True):
        if number > 2 and is_open(number):
            raise OSError(f"descriptor {number} is in use")
        os.dup2(descriptor, number)  # which makes it inheritable, as it is after an exec
        os.close(descriptor)
    for number in (0, 1, 2):
        if number not in numbers:
            os.close(number)


def stream_of(name: str, number: int, mode: str) -> TextIO | None:
    """Make a standard stream as Python makes it at its start; None if the descriptor is closed."""
    if not is_open(number):
        return None
    raw = io.FileIO(number, mode, closefd=False)
    raw.name = f"<{name}>"
    like = getattr(sys, name)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    buffer: Any = raw
    if mode == "r" or not unbuffered:
        buffer = io.BufferedWriter(raw) if mode == "w" else io.BufferedReader(raw)
    stream = io.TextIOWrapper(
        buffer,
        like.encoding,
        like.errors,
        newline="\n" if mode == "w" else None,
        line_buffering=not unbuffered and (number == 2 or raw.isatty()),
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def write_command_line(words: list[str]) -> None:
    """Let `ps` show the rank's own command line. It is written over the server's, which is padded.

    If the last byte of this memory is not 0, the kernel takes all of it for one text (proc(5),
    setproctitle(3)).
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    size = end - begin
    if size > PADDING:
        text = b" ".join(os.fsencode(word) for word in words)[: size - 2]
        ctypes.memmove(begin, text.ljust(size - 1, b"\0") + b"\1", size)


def differ() -> None:
    """Undo what forks share and separate processes would not: seeds, keys, numbers of threads."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # that of the CPU alone: torch.seed would ask each GPU
    if processes := sys.modules.get("multiprocessing.process"):
        processes.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
        processes.current_process().authkey = os.urandom(32)
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    cores = len(os.sched_getaffinity(0))
    set_openblas_threads(min(cores, int(threads)) if threads.isdigit() else cores)
    if torch is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)


def set_openblas_threads(count: int) -> None:
    """Let numpy's OpenBLAS use `count` threads. The server has loaded it with one thread."""
    found = re.search(
        r"\S*openblas\S*\.so\S*",
        Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"),
    )
    if not found or count == 1:
        return
    library = ctypes.CDLL(found[0])
    for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
        with suppress(AttributeError):
            getattr(library, name)(count)
            return


def run_rank(request: ForkRequest) -> NoReturn:
    """Run a rank's program as Python runs its main program.

    Raises:
        SystemExit: the program has ended.
    """
    words, path = request.values["program"], request.values["path"]
    if not sys.flags.safe_path:
        sys.path.insert(0, path)
    sys.orig_argv = [sys.executable, *words]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    try:
        if words[:2] == ["-m", OWN_PACKAGE]:
            sys.argv = words[1:]
            end_at_once(main_of_package(words[2:]))
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.argv = words
            file = os.path.join(os.getcwd(), words[0])  # as Python sets __file__
            loader = importlib.machinery.SourceFileLoader("__main__", file)
            main.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
            code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
            exec(code, main.__dict__)
    except Exception as error:  # noqa: BLE001  # printed as Python does it
        error.__traceback__ = _of_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    sys.exit(0)


def main_of_package(arguments: list[str]) -> int:
    """Run this package's command line. Returns its exit code."""
    # `cli` is a higher layer, which this one must not import.
    main = importlib.import_module(f"{OWN_PACKAGE}.cli").main
    try:
        code: int = main(arguments)
        return code
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def end_at_once(code: int) -> NoReturn:
    """End this process without destroying every object, which would touch all shared pages.

    It is only for our own program, which leaves nothing open. A user's program may need its objects
    to be destroyed.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _of_program(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frame of `run_rank`."""
    return traceback.tb_next if traceback is not None else None
