"""Runs a study: submits its runs and waits for them, or starts them here one after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hpc_train.errors import EXIT_STOPPED, HpcTrainError, UserError, plural
from hpc_train.launch.attempt import end_with_parent
from hpc_train.launch.hosts import allocated
from hpc_train.launch.launchers import cores_here
from hpc_train.launch.queued import read_events, still_queued
from hpc_train.launch.request import SubmitRequest
from hpc_train.launch.submit import submit
from hpc_train.scaling.study import ATTEMPT, ScaleRun, ScaleStudy
from hpc_train.times import time_text

STUDY_POLL_SECONDS = 1.0  # between two looks at the files of the runs
QUESTION_SECONDS = 30.0  # between two questions to the scheduler about a run
LATE_RECORD_SECONDS = 30.0  # in which a file system may bring the record of a job that has ended

Say = Callable[[str], None]


@dataclass
class QueuedRuns:
    """The runs of a study as batch jobs.

    Args:
        study: the study.
        request: what to submit; nodes, name and options are those of each run.
        at_once: most runs that are in the queue at the same time; 0 sets no limit.
        say: prints a line for the user.
    """

    study: ScaleStudy
    request: SubmitRequest
    at_once: int
    say: Say
    _asked: dict[ScaleRun, float] = field(default_factory=dict)
    _gone: dict[ScaleRun, float] = field(default_factory=dict)

    def submit(self, runs: Sequence[ScaleRun], *, wait: bool) -> list[ScaleRun]:
        """Submit runs that are not in the queue yet, and wait for all of them.

        Args:
            runs: the runs, in their order.
            wait: whether to wait for them. Otherwise as many are submitted as may be in the queue.

        Returns:
            The runs that have ended without a result, or without `wait` an empty list.

        Raises:
            HpcTrainError: the scheduler refuses a job.
        """
        waiting, active, failed = [*runs], list[ScaleRun](), list[ScaleRun]()
        for run in runs:  # of an earlier call
            if read_events(run.directory) and still_queued(run.directory)[1]:
                self.say(f"{run.directory} is in the queue already")
                waiting.remove(run)
                active.append(run)
        while waiting or active:
            while waiting and not (self.at_once and len(active) >= self.at_once):
                run = waiting.pop(0)
                self._submit(run)
                active.append(run)
            if not wait:
                break
            for run in [run for run in active if self._over(run)]:
                active.remove(run)
                result = self.study.result(run)
                if result is None:
                    failed.append(run)
                self.say(outcome(run, result.median if result else None))
            if active:
                time.sleep(STUDY_POLL_SECONDS)
        return failed

    def _submit(self, run: ScaleRun) -> None:
        request = replace(
            self.request,
            nodes=run.nodes,
            name=self.request.name or run.directory.name,
            options=[*self.request.options, *run.options],
            requeue_by="never",
        )
        ids = submit(request).ids
        self.say(f"{run.directory} is submitted as job {', '.join(ids)}")

    def _over(self, run: ScaleRun) -> bool:
        """Whether no job of a run is left."""
        last = read_events(run.directory)[-1:]
        if last and last[0].get("event") == "ended" and not last[0].get("next"):
            return True
        now = time.monotonic()
        if now - self._asked.setdefault(run, now) > QUESTION_SECONDS:
            self._asked[run] = now
            with suppress(HpcTrainError):  # it may answer the next time
                if still_queued(run.directory)[1]:
                    self._gone.pop(run, None)  # the scheduler did not show it for a moment
                else:
                    return now - self._gone.setdefault(run, now) > LATE_RECORD_SECONDS
        return False


def run_here(
    study: ScaleStudy,
    request: SubmitRequest,
    runs: Sequence[ScaleRun],
    say: Say,
    cores: int | None = None,
) -> list[ScaleRun]:
    """Start runs one after the other by `hpc-train launch`, on the hosts of this job or here.

    Args:
        study: the study.
        request: the configuration, and the options of the training.
        runs: the runs, in their order.
        say: prints a line for the user.
        cores: physical cores of a host; None: as `hpc-train launch` finds them.

    Returns:
        The runs that have ended without a result.

    Raises:
        UserError: this job has fewer hosts than a run needs.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP has stopped a run, which has ended.
    """
    allocation = allocated(os.environ)
    names = [host.name for host in allocation.known_hosts()] if allocation else []
    most = max((run.nodes for run in runs), default=0)
    if allocation and most > len(names):
        raise UserError(
            f"--nodes has {most}, and this job has {plural(len(names), 'node')}",
            "give fewer --nodes, or run it in a larger job",
        )
    environ = dict(os.environ)
    if not allocation and "OMP_NUM_THREADS" not in environ:
        # Otherwise the ranks of a small job would have more cores each than those of a large one.
        ranks = max(study.nodes) * study.ranks_per_node
        environ["OMP_NUM_THREADS"] = str(max(1, (cores or cores_here()) // ranks))
    failed = []
    for run in runs:
        words = [sys.executable, "-m", "hpc_train", "launch"]
        words += ["-np", str(run.nodes * study.ranks_per_node)]
        if allocation:
            slots = (f"{name}:{study.ranks_per_node}" for name in names[: run.nodes])
            words += ["-H", ",".join(slots)]
        words += ["--cores", str(cores)] if cores else []
        words += ["--", "train", str(request.config), *request.options, *run.options]
        run.directory.mkdir(parents=True, exist_ok=True)
        code = _run(words, environ, run)
        result = study.result(run)
        if result is None:
            failed.append(run)
        say(outcome(run, result.median if result else None))
        if code == EXIT_STOPPED:
            raise KeyboardInterrupt
    return failed


def _run(words: Sequence[str], environ: dict[str, str], run: ScaleRun) -> int:
    """Run a command, whose output goes to the run directory; returns its exit code.

    SIGTERM and SIGHUP stop it. They would otherwise end this process alone.
    """
    with (run.directory / "launch.out").open("ab", buffering=0) as output:
        output.write(ATTEMPT.encode())
        process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )
        before = {
            number: signal.signal(number, lambda *_: process.terminate())
            for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # as below nohup
        }
        try:
            return _waited(process)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _waited(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; returns its exit code."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # it has got the signal of the terminal, too, and stops
            continue


def outcome(run: ScaleRun, seconds: float | None) -> str:
    """A line that says what became of a run."""
    if seconds is None:
        return f"{run.directory} has ended without a result"
    return f"{run.directory}: a step takes {time_text(seconds)}"
