"""Keeps a job going: a failure is named, hosts that are gone are left out, and it starts again.

The job's own checkpoints carry it over; what is kept here is how often it failed and how far it
came.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_train.errors import EXIT_STOPPED, EXIT_USER, HpcTrainError
from hpc_train.launch.attempt import Attempt, Outcome
from hpc_train.launch.cause import OUT_OF_MEMORY, PERHAPS_MEMORY, explain
from hpc_train.launch.hosts import Host, take
from hpc_train.launch.launchers import Found, Job

PROBE_SECONDS = 15.0  # in which a host must have started and ended a process
FUTILE = 3  # attempts in a row that come no further than those before: it would never end
FINAL = (0, EXIT_USER, EXIT_STOPPED)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Supervisor:
    """Runs a job and starts it again when it fails.

    Args:
        launcher: starts it.
        job: on the hosts that it begins with.
        hosts: all that there are, the spare ones too; none: this machine alone.
        restarts: how often it may be started again.
        progress: file in which the job tells how far it is.
        journal: file that gets a JSON line for each start and end; None: none.
        shrink: the largest number of ranks below a limit that the job can run with, and the options
            that it needs for that; 0 if none.
        say: prints a line for the user.
    """

    launcher: Found
    job: Job
    hosts: Sequence[Host]
    restarts: int
    progress: Path
    journal: Path | None
    shrink: Callable[[int], tuple[int, list[str]]]
    say: Callable[[str], None]
    _stopping: bool = False
    _attempt: Attempt | None = None

    def run(self) -> int:
        """Run the job to its end; returns its exit code.

        Raises:
            HpcTrainError: it failed more often than it may, or comes no further.
        """
        with self._signals():
            return self._run()

    def _run(self) -> int:
        job, best, futile, lost_after = self.job, -1, 0, -1
        for restart in range(self.restarts + 1):
            outcome = self._once(job, restart, lost_after)
            if outcome.code in FINAL:
                return outcome.code
            cause = _cause(outcome)
            reached = outcome.progress.step
            futile = 0 if reached > best else futile + 1
            best, lost_after = max(best, reached), max(reached, 0)
            if self._stopping:
                raise HpcTrainError(f"{cause}, while it was stopping")
            self._check(restart, futile, cause)
            job = self._next(cause)
            self.say(
                f"{cause}; restart {restart + 1} of {self.restarts} with {job.ranks} ranks"
                + (f" on {job.listed()}" if job.hosts else "")
            )
        raise AssertionError("the last attempt returns or raises")

    def _check(self, restart: int, futile: int, cause: str) -> None:
        again = "the logs in the run directory show more; the same command goes on from the last "
        if futile >= FUTILE:
            raise HpcTrainError(
                f"{cause}; {futile} starts in a row came no further than those before",
                f"it would fail for ever: mend the cause; {again}checkpoint",
            )
        if restart >= self.restarts:
            times = f" after {restart} restarts" if restart else ""
            raise HpcTrainError(f"{cause}{times}", f"{again}checkpoint")

    def _once(self, job: Job, restart: int, lost_after: int) -> Outcome:
        told = {"HPC_TRAIN_PROGRESS": str(self.progress.absolute())}
        if restart:
            told |= {"HPC_TRAIN_RESTARTS": str(restart), "HPC_TRAIN_REACHED": str(lost_after)}
        line = self.launcher.make(replace(job, environ={**job.environ, **told}))
        environ = {**os.environ, **job.environ, **told}
        begun = time.time()
        self._write(event="start", restart=restart, ranks=job.ranks, hosts=job.listed())
        self._attempt = Attempt(line, environ, self.progress)
        if self._stopping:
            self._attempt.ask_to_stop()
        outcome = self._attempt.watch()
        self._write(
            event="end",
            restart=restart,
            code=outcome.code,
            cause="" if outcome.code in FINAL else _cause(outcome),
            step=outcome.progress.step,
            seconds=round(time.time() - begun, 3),
        )
        return outcome

    def _next(self, cause: str) -> Job:
        """The job on what is left of the hosts."""
        if not self.hosts:
            return self.job
        alive = self._alive()
        if missing := [host.name for host in self.hosts if host not in alive]:
            self.say(f"left out, because they do not answer: {', '.join(missing)}")
        ranks, options = self.job.ranks, list[str]()
        if (slots := sum(host.slots for host in alive)) < ranks:
            ranks, options = self.shrink(slots)
        if not ranks:
            raise HpcTrainError(
                f"{cause}; what is left, {slots} slots on {len(alive)} hosts, is too little",
                "start the same command when there are more; it goes on from the last checkpoint",
            )
        used, _ = take(alive, ranks)
        return replace(self.job, ranks=ranks, hosts=used, command=[*self.job.command, *options])

    def _alive(self) -> list[Host]:
        with ThreadPoolExecutor(max_workers=16) as pool:
            answers = list(pool.map(self._answers, self.hosts))
        return [host for host, answer in zip(self.hosts, answers, strict=True) if answer]

    def _answers(self, host: Host) -> bool:
        if host.name in ("localhost", socket.gethostname()):
            return True
        probe = Job([sys.executable, "-c", "pass"], 1, [Host(host.name, 1)])
        words, environ = self.launcher.make(probe).words, self.launcher.make(probe).environ
        try:
            done = subprocess.run(
                words,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _write(self, **record: Any) -> None:
        if self.journal is not None:
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with self.journal.open("a") as file:
                file.write(json.dumps({"time": round(time.time(), 3), **record}) + "\n")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The first signal has the job save and stop; a second Ctrl-C ends it at once."""
        if self._attempt is not None:
            if self._stopping and number == signal.SIGINT:
                self._attempt.kill()
            else:
                self._attempt.ask_to_stop()
        self._stopping = True


def _cause(outcome: Outcome) -> str:
    if outcome.silent:
        return (
            f"no progress for {outcome.silent:.0f} s after step {outcome.progress.step}: "
            "all ranks hang or have been stopped"
        )
    cause = explain(outcome.code, outcome.lines)
    if outcome.starved and f"({socket.gethostname()})" in cause:
        return cause.replace(PERHAPS_MEMORY, f": its host ran {OUT_OF_MEMORY}")
    return cause
