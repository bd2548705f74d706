"""One attempt of a job: start its launcher, read its output, stop it, end what it leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from hpc_train.host.process import RunningClock
from hpc_train.launch.left_behind import LeftBehind
from hpc_train.launch.lines import Line
from hpc_train.launch.protocol import LOCAL_JOB, NO_PROGRESS, JobProgress, attempt_of, read_progress

LINES_KEPT = 400  # last lines of output that are searched for the cause of a failure
PIPE_BYTES = 1 << 16  # of output that are read at once, and that are kept of a line without end
POLL_SECONDS = 0.1  # seconds between two looks at the job
LONGEST_POLL = 1.0  # most seconds that count between them: a suspended launcher hears nothing
GRACE = 5.0  # seconds in which a launcher can end its ranks before it is killed with them
LOST_GRACE = 1.0  # the same after a host has died: a launcher would wait for its ranks in vain
PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)  # loaded now, because little is safe between fork and exec


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Args:
        code: the launcher's exit code.
        lines: the last lines of output.
        silent: seconds without progress, if it was ended for that; else 0.
        progress: the last progress that the job reported.
        starved: whether this host's kernel killed a process for lack of memory meanwhile.
        lost: hosts that stopped answering, if it was ended for that.
    """

    code: int
    lines: list[str]
    silent: float
    progress: JobProgress
    starved: bool = False
    lost: Sequence[str] = ()


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent dies; its ranks end with it."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_with_script(environ: Mapping[str, str]) -> None:
    """Have the kernel send this process SIGTERM when the script of a local job, its parent, dies.

    A script that is killed cannot end what it has started, and no scheduler does it here.

    Args:
        environ: the variables of this process.
    """
    job = environ.get(LOCAL_JOB, "").partition("-")[0]
    with suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        if job in (str(parent.ppid()), str(parent.pid)):  # the job is the script's `timeout`
            end_with_parent()


def memory_kills() -> int:
    """Number of processes that this host's kernel has killed for lack of memory."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def kill_session(leader: int) -> None:
    """Kill what is left of the session that a process on this host has begun."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader:
                process.kill()


class Attempt:
    """A running launcher. Its output is copied to ours.

    Args:
        line: the line to start.
        environ: environment variables, to which those of the line are added.
        progress: the file to which rank 0 of the job writes its progress.
        start_limit: seconds until it must have written there for the first time; 0 disables this.
        lost: is called with the seconds without progress, and returns the hosts that have died.
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
        """Set it to True, and `watch` ends the job at once."""
        self._asked = False
        self._name = attempt_of(environ)
        self.process = subprocess.Popen(
            line.words,
            env={**environ, **line.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C reaches us alone
            preexec_fn=end_with_parent,
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
        """Copy output at once, because a progress bar does not end its line, and keep the lines."""
        decoder, begun, more = getincrementaldecoder("utf-8")("replace"), "", True
        with source:
            while more:
                raw = os.read(source.fileno(), PIPE_BYTES)
                more, text = bool(raw), decoder.decode(raw, final=not raw)
                with suppress(OSError, ValueError):  # nobody reads our own output any more
                    target.write(text)
                    target.flush()
                *lines, begun = (begun + text).split("\n")
                begun = begun[-PIPE_BYTES:]
                if begun and not more:
                    lines.append(begun)
                for line in lines:
                    self.lines.append(line)
                    self._left_behind.hear(line)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the launcher's end; returns whether it has ended.

        Args:
            seconds: longest time to wait; None: no limit.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        return False

    def ask_to_stop(self) -> None:
        """Ask the ranks to write a checkpoint and end. Launchers pass SIGUSR1 on to them.

        A launcher that has not started the ranks yet loses it, so `watch` asks once more when they
        report progress for the first time. It asks no oftener: a program of the user's may take it
        for more urgent then.
        """
        self._asked = True
        for process in self._launchers():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)

    def _launchers(self) -> list[psutil.Process]:
        """The processes that pass signals on to the ranks: for horovodrun its mpirun."""
        with suppress(psutil.Error):
            first = psutil.Process(self.process.pid)
            below = [child for child in first.children(recursive=True) if child.name() == "mpirun"]
            is_mpirun = first.name() in ("mpirun", "mpiexec", "srun", "prterun", "mpiexec.hydra")
            return [first] if is_mpirun or not below else below
        return []

    def watch(self) -> Outcome:
        """Wait for its end. End it if it makes no progress for too long, or a host has died."""
        before = memory_kills()
        lost: Sequence[str] = ()
        clock, heard, last, silent = RunningClock(LONGEST_POLL), 0.0, NO_PROGRESS, 0.0
        while not self.wait(POLL_SECONDS):
            told = read_progress(self.path, self._name, last)
            now = clock.look()
            if told != last:  # by our clock: the file server's may differ
                if last is NO_PROGRESS and self._asked:
                    self.ask_to_stop()
                heard, last = now, told
            if self._left_behind.due:
                self._left_behind.end()
            silent = now - heard
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
        told = read_progress(self.path, self._name, last)
        return Outcome(self.process.returncode, list(self.lines), silent, told, starved, lost)

    def kill(self, grace: float = GRACE) -> None:
        """End the launcher and its ranks.

        Args:
            grace: seconds before a launcher that has not ended is killed.
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
        """Kill ranks on this host that have outlived their launcher, and read the last output."""
        kill_session(self.process.pid)
        for thread in self._threads:
            thread.join(GRACE)
