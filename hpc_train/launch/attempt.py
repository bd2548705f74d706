"""One run of a job under its launcher: started, listened to, told to stop, and cleared away."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from hpc_train.launch.launchers import Line
from hpc_train.launch.left_behind import LeftBehind
from hpc_train.launch.protocol import JobProgress, read_progress

LINES_KEPT = 400  # last lines of the output, in which the cause of a failure is looked for
POLL_SECONDS = 0.1  # seconds between two looks at the job
GRACE = 5.0  # seconds that a launcher has to end its ranks, before it is killed with them
LOST_GRACE = 1.0  # the same if a host has died, whose ranks it would wait for in vain
PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)  # loaded before a fork, after which little is safe


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Args:
        code: the launcher's exit code.
        lines: the last ones that were printed.
        silent: seconds without any progress, after which it was ended; 0: it was not.
        progress: the last.
        starved: whether the kernel of this host ended a process meanwhile for lack of memory.
        lost: hosts that did not answer any more, for which it was ended.
    """

    code: int
    lines: list[str]
    silent: float
    progress: JobProgress
    starved: bool = False
    lost: Sequence[str] = ()


def _end_with_parent() -> None:
    """Have this process, a launcher, get SIGTERM when we are killed: its ranks end with it."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def memory_kills() -> int:
    """Processes of this host that its kernel has ended for lack of memory."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


class Attempt:
    """A launcher at work, whose output goes on to ours.

    Args:
        line: what is started.
        environ: the variables, besides those of the line.
        progress: the file in which the job's first rank tells how far it is.
        start_limit: seconds until it must have told it for the first time; 0: for ever.
        lost: the job's hosts that have died, after this many seconds without progress.
    """

    def __init__(
        self,
        line: Line,
        environ: Mapping[str, str],
        progress: Path,
        start_limit: float = 0.0,
        lost: Callable[[float], Sequence[str]] = lambda silence: (),
    ) -> None:
        self.path, self.start_limit, self.lost = progress, start_limit, lost
        self.unwanted = False
        """Set it to have `watch` end the job at once."""
        with suppress(FileNotFoundError):
            progress.unlink()
        self.process = subprocess.Popen(
            line.words,
            env={**environ, **line.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C reaches us alone
            preexec_fn=_end_with_parent,
        )
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._left_behind = LeftBehind()
        assert self.process.stdout and self.process.stderr  # noqa: PT018
        self._threads = [
            threading.Thread(target=self._copy, args=pair, daemon=True)
            for pair in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def _copy(self, source: IO[bytes], target: IO[str]) -> None:
        with source:
            for raw in source:
                text = raw.decode(errors="replace")
                self.lines.append(text.rstrip("\n"))
                self._left_behind.hear(text)
                with suppress(OSError, ValueError):  # nobody reads ours any more
                    target.write(text)
                    target.flush()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end; returns whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        return False

    def ask_to_stop(self) -> None:
        """Have the ranks write a checkpoint and end: launchers pass SIGUSR1 on to them."""
        for process in self._launchers():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)

    def _launchers(self) -> list[psutil.Process]:
        """The launcher; in place of horovodrun, which passes nothing on, the mpirun below it."""
        with suppress(psutil.Error):
            first = psutil.Process(self.process.pid)
            below = [child for child in first.children(recursive=True) if child.name() == "mpirun"]
            is_mpirun = first.name() in ("mpirun", "mpiexec", "srun", "prterun", "mpiexec.hydra")
            return [first] if is_mpirun or not below else below
        return []

    def watch(self) -> Outcome:
        """Wait for its end, which comes too when it is silent for too long or a host has died."""
        before = memory_kills()
        lost: Sequence[str] = ()
        heard, last, silent = time.monotonic(), read_progress(self.path), 0.0
        while not self.wait(POLL_SECONDS):
            told = read_progress(self.path)
            if told != last:  # by our clock: that of the file's server may differ
                heard, last = time.monotonic(), told
            if self._left_behind.due:
                self._left_behind.end()
            silent = time.monotonic() - heard
            due = told.due if told.step >= 0 else self.start_limit
            lost = self.lost(silent)
            if self.unwanted or lost or (due and silent > due):
                self.kill(LOST_GRACE if lost else GRACE)
                break
        else:
            silent = 0.0
        if self.unwanted:
            silent = 0.0
        self._clear()
        starved = memory_kills() > before
        told = read_progress(self.path)
        return Outcome(self.process.returncode, list(self.lines), silent, told, starved, lost)

    def kill(self, grace: float = GRACE) -> None:
        """End launcher and ranks.

        Args:
            grace: seconds that the launcher has for it.
        """
        left = self._family()
        self.process.terminate()
        if not self.wait(grace):
            self.process.kill()
            self.process.wait()
        for process in left:
            with suppress(psutil.Error):
                process.kill()

    def _family(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def _clear(self) -> None:
        """End the ranks of this host that have outlived their launcher, and hear the last words."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.process.pid:
                    process.kill()
        for thread in self._threads:
            thread.join(GRACE)
