"""Restarts a job when it fails: names the cause, leaves out lost hosts, and starts it again.

The job resumes from its own checkpoints. The supervisor only keeps how often the job has failed and
which step it reached.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_train import files
from hpc_train.errors import EXIT_STOPPED, FINAL_CODES, HpcTrainError, plural
from hpc_train.host.process import RunningClock
from hpc_train.launch.attempt import (
    LONGEST_POLL,
    POLL_SECONDS,
    Attempt,
    Outcome,
    kill_session,
)
from hpc_train.launch.cause import OUT_OF_MEMORY, PERHAPS_MEMORY, explain
from hpc_train.launch.contact import Contact
from hpc_train.launch.hosts import Host, take_hosts
from hpc_train.launch.launchers import FoundLauncher
from hpc_train.launch.lines import LaunchedJob
from hpc_train.launch.protocol import LAUNCH, PROGRESS, REACHED, RESTARTS, STOP, STOP_SIGNALS

HOST_PROBE_SECONDS = 60.0  # seconds in which hosts must start and end a process
PROBE = "true"  # a program of each host's own disk: network file systems may be slow
PROBES_AT_ONCE = 16
FUTILE = 3  # attempts in a row without progress, after which the job is given up
START = 600.0  # least seconds for imports, MPI and loading, which are slow on thousands of ranks


@dataclass
class Supervisor:
    """Runs a job and starts it again when it fails.

    Args:
        launcher: the launcher that starts the job.
        job: the job, on its first hosts.
        hosts: all hosts, with the spare ones; empty: this machine alone.
        restarts: maximum number of restarts.
        progress: the file to which the job writes its progress.
        run_dir: the run directory. It gets launch.jsonl, with a line for each start and each end of
            an attempt; a file STOP in it ends the job. None: the job is no `train` of this package.
        start_limit: seconds until the job must report progress for the first time; 0 disables this.
        shrink: takes a number of slots; returns the largest number of ranks that the job can run
            with on them (0 if there is none), and the options that it needs for that.
        say: prints a line for the user.
    """

    launcher: FoundLauncher
    job: LaunchedJob
    hosts: Sequence[Host]
    restarts: int
    progress: Path
    run_dir: Path | None
    start_limit: float
    shrink: Callable[[int], tuple[int, list[str]]]
    say: Callable[[str], None]
    _stopping: bool = False
    _attempt: Attempt | None = None

    def __post_init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._contact = Contact([host.name for host in self.hosts])

    def run(self) -> int:
        """Run the job to its end; returns its exit code.

        Raises:
            HpcTrainError: it failed more often than it may, or made no progress.
        """
        with self._signals():
            return self._run()

    def _run(self) -> int:
        job, best, futile, lost_after = self.job, -1, 0, 0
        for restart in range(self.restarts + 1):
            if self._stopping or (restart and self.run_dir and (self.run_dir / STOP).exists()):
                self.say("asked to stop: the job is not started")
                return EXIT_STOPPED
            outcome = self._once(job, restart, lost_after)
            if self._is_final(outcome):
                return outcome.code
            cause = cause_of(outcome)
            reached = outcome.progress.step
            futile = 0 if reached > best else futile + 1
            best, lost_after = max(best, reached), reached if reached >= 0 else lost_after
            if self._stopping and reached < 0:
                self.say("asked to stop: the job ended before its ranks had reported a step")
                return EXIT_STOPPED
            if self._stopping:
                raise HpcTrainError(f"{cause}, while the job was stopping")
            self._check(restart, futile, cause)
            job = self._next(cause, outcome)
            self.say(
                f"{cause}; restart {restart + 1} of {self.restarts} with "
                f"{plural(job.ranks, 'rank')}" + (f" on {job.listed()}" if job.hosts else "")
            )
        raise AssertionError("the last attempt returns or raises")

    def _check(self, restart: int, futile: int, cause: str) -> None:
        logs = "the logs in the run directory show more"
        again = f"{logs}; the same command resumes from the last checkpoint" if self.run_dir else ""
        if futile >= FUTILE:
            raise HpcTrainError(
                f"{cause}; {futile} starts in a row made no progress",
                "; ".join(["restarts do not help: remove the cause", *([again] if again else [])]),
            )
        if restart >= self.restarts:
            raise HpcTrainError(f"{cause} after {restart} restarts" if restart else cause, again)

    def _once(self, job: LaunchedJob, restart: int, lost_after: int) -> Outcome:
        told = {PROGRESS: str(self.progress.absolute()), LAUNCH: self._name}
        if restart:
            told |= {RESTARTS: str(restart), REACHED: str(lost_after)}
        line = self.launcher.make(replace(job, environ={**job.environ, **told}))
        environ = {**os.environ, **job.environ, **told}
        begun = time.time()
        self._write(event="start", restart=restart, ranks=job.ranks, hosts=job.listed())
        lost = partial(self._contact.lost_in, [host.name for host in job.hosts])
        self._attempt = Attempt(line, environ, self.progress, self.start_limit, lost)
        if self._stopping:
            self._attempt.ask_to_stop()
        outcome = self._attempt.watch()
        self._write(
            event="end",
            restart=restart,
            code=outcome.code,
            cause="" if self._is_final(outcome) else cause_of(outcome),
            step=outcome.progress.step,
            seconds=round(time.time() - begun, 3),
        )
        return outcome

    def _is_final(self, outcome: Outcome) -> bool:
        # srun has been seen to exit with 0 when it could not start all ranks.
        unfinished = outcome.code == 0 and self.run_dir and not outcome.progress.done
        return outcome.code in FINAL_CODES and not unfinished

    def _next(self, cause: str, outcome: Outcome) -> LaunchedJob:
        """The job on the hosts that are left."""
        if not self.hosts:
            return replace(self.job, again=True)
        alive = self._alive(cause, outcome)
        if missing := [host.name for host in self.hosts if host not in alive]:
            self.say(f"left out, because they do not answer: {', '.join(missing)}")
        ranks, options = self.job.ranks, list[str]()
        if (slots := sum(host.slots for host in alive)) < ranks:
            ranks, options = self.shrink(slots)
        if not ranks:
            raise HpcTrainError(
                f"{cause}; {plural(slots, 'slot is', 'slots are')} left on "
                f"{plural(len(alive), 'host')}, too few",
                "run the same command when there are more; it resumes from the last checkpoint",
            )
        command, hosts = [*self.job.command, *options], take_hosts(alive, ranks)
        return replace(self.job, ranks=ranks, hosts=hosts, command=command, again=True)

    def _alive(self, cause: str, outcome: Outcome) -> list[Host]:
        names = [host.name for host in self.hosts if host.name not in outcome.lost]
        lost = self._contact.lost(names)
        hosts = [host for host in self.hosts if host.name in names and host.name not in lost]
        trained = outcome.progress.step >= 0 and "was lost" not in cause
        if trained and all(self._contact.knows(host.name) for host in hosts):
            return hosts  # the next attempt shows soonest whether ranks can start there
        here = [host for host in hosts if host.name in ("localhost", socket.gethostname())]
        suspects = [host for host in hosts if f"host {host.name} " in cause and host not in here]
        others = [host for host in hosts if host not in here + suspects]
        sound = here + self._sound(others, suspects)
        return [host for host in hosts if host in sound]

    def _sound(self, hosts: list[Host], suspects: list[Host]) -> list[Host]:
        """The hosts that start a process: by one step over all of them if all do.

        If some do not, the step is tried over parts of them, and then over single hosts.

        Args:
            hosts: hosts.
            suspects: hosts that are named as the cause. Each has a single step of its own.
        """
        with ThreadPoolExecutor(max_workers=PROBES_AT_ONCE) as pool:
            groups = [hosts, *([host] for host in suspects)]
            first, *alone = pool.map(self._start, groups)
            sound = [host for host, starts in zip(suspects, alone, strict=True) if starts]
            if first:
                return hosts + sound
            left = hosts
            for size in (-(-len(hosts) // PROBES_AT_ONCE), 1):
                if left:  # other probes, or the end of the last attempt, may have disturbed them
                    time.sleep(1.0)
                parts = [left[begin : begin + size] for begin in range(0, len(left), size)]
                answers = list(zip(parts, pool.map(self._start, parts), strict=True))
                sound += [host for part, starts in answers if starts for host in part]
                left = [host for part, starts in answers if not starts for host in part]
        return sound

    def _start(self, hosts: list[Host]) -> bool:
        """Whether a process starts and ends on each of these hosts, by one step of the launcher."""
        if not hosts:
            return True
        one_each = [Host(host.name, 1) for host in hosts]
        line = self.launcher.make(LaunchedJob([PROBE], len(hosts), one_each, again=True))
        with subprocess.Popen(
            line.words,
            env={**os.environ, **line.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C says nothing about the hosts
        ) as process:
            clock = RunningClock(LONGEST_POLL)
            while clock.look() < HOST_PROBE_SECONDS:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_SECONDS) == 0
            kill_session(process.pid)
            return False

    def _write(self, **record: Any) -> None:
        """Record what happens to an attempt; a job does not end for want of its record."""
        if self.run_dir is None:
            return
        path = self.run_dir / "launch.jsonl"
        try:
            files.append_record(path, {"time": round(time.time(), 3), **record})
        except OSError as error:
            self.say(f"{path} cannot be written ({error.strerror}), so reports lack this attempt")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        # Ignored signals stay ignored, so that `nohup` outlives the terminal.
        heard = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._note) for number in heard}
        # Signals that were held back since the start of the program arrive now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """At the first signal the job saves and stops; a second Ctrl-C ends it at once."""
        if self._attempt is not None:
            if self._stopping and number == signal.SIGINT:
                self._attempt.unwanted = True
            else:
                self._attempt.ask_to_stop()
        self._stopping = True


def cause_of(outcome: Outcome) -> str:
    """Why an attempt failed, in a few words."""
    if len(outcome.lost) == 1:
        return f"host {outcome.lost[0]} does not answer"
    if outcome.lost:
        return f"hosts {', '.join(outcome.lost)} do not answer"
    if outcome.silent and outcome.progress.step < 0:
        return (
            f"no sign of training for {outcome.silent:.0f} s: a rank hangs as it starts, or its "
            "host does not answer"
        )
    if outcome.silent:
        return (
            f"no progress for {outcome.silent:.0f} s after step {outcome.progress.step}: "
            "all ranks hang or have been stopped"
        )
    if outcome.code == 0:
        return "the launcher exited with code 0, but the training is not finished"
    cause = explain(outcome.code, outcome.lines)
    if outcome.starved and f"({socket.gethostname()})" in cause:
        return cause.replace(PERHAPS_MEMORY, f": its host ran {OUT_OF_MEMORY}")
    return cause
