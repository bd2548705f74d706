"""The jobs of a run: `submit` records what it queues, and asks the scheduler what became of it.

RUN/jobs.jsonl has a line for each job that was queued ("event": "queued") and one for each that
ended ("ended"), which the job's script writes. "job" is the scheduler's id, and "next" that of the
job that follows.

Sources: squeue(1) and scancel(1) of Slurm 22.05, qstat(1B) and qdel(1B) of OpenPBS 23, Torque's
manual, kubectl's reference.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import HpcTrainError, UserError
from hpc_train.launch import Scheduler
from hpc_train.launch.protocol import QUEUED

ANSWER_SECONDS = 30.0  # seconds to wait for the scheduler's answer
DELETE = {
    "slurm": ("scancel",),
    "pbs": ("qdel",),
    "torque": ("qdel",),
    "mpijob": ("kubectl", "delete"),
}
PBS_STATES = {
    "B": "RUNNING",  # an array of which a task has started
    "E": "EXITING",
    "H": "HELD",
    "Q": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "T": "MOVING",
    "W": "WAITING",
}
PBS_OVER = ("C", "F", "X")


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits in the queue or runs.

    Args:
        id: the scheduler's id.
        state: such as PENDING or RUNNING.
        why: why it waits, as the scheduler says it.
        elapsed: how long it has run; "" if that is not known.
        hosts: where it runs.
    """

    id: str
    state: str
    why: str = ""
    elapsed: str = ""
    hosts: str = ""


def record_queued(run: Path, scheduler: Scheduler, job: str) -> None:
    """Record that a job of the run was queued."""
    line = {"time": int(time.time()), "event": "queued", "job": job, "scheduler": scheduler}
    with (run / QUEUED).open("a") as file:
        file.write(f"{json.dumps(line)}\n")


def read_events(run: Path) -> list[dict[str, Any]]:
    """The lines of jobs.jsonl of a run and its tasks; a line that cannot be read is left out."""
    events = []
    for directory in (run, *sorted(run.glob("task-*"))):
        text = ""
        with suppress(OSError):
            text = (directory / QUEUED).read_text(errors="replace")
        for line in text.splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
    return events


def still_queued(run: Path) -> tuple[Scheduler | None, list[QueuedJob]]:
    """The jobs of a run that wait in the queue or run, and their scheduler.

    Raises:
        HpcTrainError: the scheduler does not say.
    """
    events = read_events(run)
    schedulers = [event["scheduler"] for event in events if event.get("scheduler") in DELETE]
    ids = [str(event[key]) for event in events for key in ("job", "next") if event.get(key)]
    if not schedulers or not ids:
        return None, []
    scheduler: Scheduler = schedulers[-1]
    asks = {"slurm": _slurm, "mpijob": _mpijob}
    return scheduler, asks.get(scheduler, _pbs)(list(dict.fromkeys(ids)))


@contextmanager
def one_submission(run: Path) -> Iterator[None]:
    """Keep other submissions of a run waiting, where the file system has locks.

    Raises:
        UserError: a job of the run is queued or runs.
        HpcTrainError: the scheduler does not say.
    """
    with (run / QUEUED).open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        _, jobs = still_queued(run)
        if jobs:
            told = ", ".join(f"{job.id} ({job.state})" for job in jobs)
            raise UserError(
                f"{run} has a job already: {told}",
                f"wait for its end, or end it by `hpc-train cancel --now {run}`, or give another "
                "run.dir",
            )
        yield


def delete(scheduler: Scheduler, ids: Sequence[str]) -> None:
    """Remove jobs from the queue, and end those that run.

    Raises:
        HpcTrainError: the scheduler does not do it.
    """
    words = [*DELETE[scheduler], *ids]
    done = _run(words)
    if done.returncode:
        raise HpcTrainError(f"{shlex.join(words)}: {_told(done)}", "try again")


def _slurm(ids: Sequence[str]) -> list[QueuedJob]:
    # %i is 7_3 for task 3 of array 7, %A that task's own id, and %F 7.
    fields = "%i|%A|%F|%T|%r|%M|%N"
    done = _run(["squeue", "-h", "-j", ",".join(ids), "-o", fields])
    if done.returncode and "Invalid job id" not in done.stderr:  # it has forgotten the only one
        raise _silent(done)
    found = []
    for line in done.stdout.splitlines():
        name, task, array, state, why, elapsed, hosts = (*line.strip().split("|"), *[""] * 7)[:7]
        if {name, task, array} & {*ids}:
            reason = "" if why == "None" else why
            found.append(QueuedJob(name, state, reason, elapsed, hosts))
    return found


def _pbs(ids: Sequence[str]) -> list[QueuedJob]:
    done = _run(["qstat", "-f", *ids])
    over = ("Unknown Job", "has finished")
    if any(not any(word in line for word in over) for line in done.stderr.splitlines()):
        raise _silent(done)
    found = []
    for text in done.stdout.split("Job Id:")[1:]:
        pairs: list[tuple[str, str]] = re.findall(r"^\s+([\w.]+) = (.*)$", text, re.MULTILINE)
        values = dict(pairs)
        state = values.get("job_state", "")
        if state not in PBS_OVER:
            found.append(
                QueuedJob(
                    text.split()[0],
                    PBS_STATES.get(state, state),
                    values.get("comment", "") if state == "Q" else "",
                    values.get("resources_used.walltime", ""),
                    values.get("exec_host", ""),
                )
            )
    return found


def _mpijob(ids: Sequence[str]) -> list[QueuedJob]:
    found = []
    shown = "jsonpath={.metadata.name}|{.status.conditions[-1:].type}"
    for name in ids:
        done = _run(["kubectl", "get", name, "--ignore-not-found", "-o", shown])
        if done.returncode:
            raise _silent(done)
        _, there, state = done.stdout.strip().partition("|")
        if there and state not in ("Succeeded", "Failed"):
            found.append(QueuedJob(name, state or "Created"))
    return found


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
            env=_english(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"no answer within {ANSWER_SECONDS:.0f} s"
        if isinstance(error, OSError):
            why = error.strerror or type(error).__name__
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]}: {why}")


def _english() -> dict[str, str]:
    return dict(os.environ) | {"LC_ALL": "C"}


def _silent(done: subprocess.CompletedProcess[str]) -> HpcTrainError:
    return HpcTrainError(
        f"the scheduler does not say whether a job of this run is queued: {_told(done)}",
        f"try again, or remove {QUEUED} of the run directory if no job is left",
    )


def _told(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
