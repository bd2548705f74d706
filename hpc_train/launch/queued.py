"""The jobs of a run: `submit` records what it queues, and asks the scheduler what became of it.

RUN/jobs.jsonl has a line for each job that was queued ("event": "queued") and one for each that
ended ("ended"), which the job's script writes. "job" is the scheduler's id, and "next" that of the
job that follows.
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

from hpc_train import files
from hpc_train.errors import UserError
from hpc_train.launch import SchedulerName
from hpc_train.launch.protocol import QUEUED
from hpc_train.launch.schedulers import QueuedJob, Scheduler, scheduler_of

TASKS = "tasks.json"  # in the run directory of a sweep: the options of each task


def record_queued(run: Path, scheduler: SchedulerName, job: str, task: int | None = None) -> None:
    """Record that a job of the run was queued, or one of a task alone."""
    line = {"time": int(time.time()), "event": "queued", "job": job, "scheduler": scheduler}
    if task is not None:
        line["task"] = task
    files.append_record(run / QUEUED, line)


def read_events(run: Path) -> list[dict[str, Any]]:
    """The lines of jobs.jsonl of a run and its tasks; a line that cannot be read is left out."""
    folders = (run, *sorted(run.glob("task-*")))
    return [event for folder in folders for event in files.lines_of(folder / QUEUED)]


def jobs_of(run: Path) -> tuple[Scheduler | None, list[str]]:
    """The scheduler that the run's last job was given to, and the ids of the jobs that it got."""
    events = read_events(run)
    known = get_args(SchedulerName)
    names = [event["scheduler"] for event in events if event.get("scheduler") in known]
    if not names:
        return None, []
    of_others = {  # jobs of an earlier submission, to another scheduler
        str(event.get("job")) for event in events if event.get("scheduler", names[-1]) != names[-1]
    }
    for event in events:
        if str(event.get("job")) in of_others and event.get("next"):
            of_others.add(str(event["next"]))
    ids = [str(event[key]) for event in events for key in ("job", "next") if event.get(key)]
    return scheduler_of(names[-1]), [job for job in dict.fromkeys(ids) if job not in of_others]


def still_queued(run: Path) -> tuple[Scheduler | None, list[QueuedJob]]:
    """The jobs of a run that wait in the queue or run, and their scheduler.

    Raises:
        HpcTrainError: the scheduler does not say.
    """
    scheduler, ids = jobs_of(run)
    if scheduler is None:
        return None, []
    if not scheduler.ids_come_back:
        ended = {str(e.get("job")) for e in read_events(run) if e.get("event") == "ended"}
        ids = [job for job in ids if job not in ended]
    return scheduler, scheduler.queued(ids) if ids else []


def tasks_of(job: str) -> list[int]:
    """The tasks that an id of an array stands for: 7_3, 7_[0-2,5%2] or 7[3].server; else none."""
    found = re.search(r"_(\d+)$|\[([\d,-]+)", job)
    if not found:
        return []
    parts = [part.partition("-") for part in (found[1] or found[2]).split(",") if part]
    return [task for a, _, b in parts for task in range(int(a), int(b or a) + 1)]


def write_tasks(run: Path, tasks: Mapping[int, Sequence[str]]) -> None:
    """Record the options of each task of a sweep, or that the run has none."""
    path = run / TASKS
    if tasks:
        tree = {str(number): list(words) for number, words in tasks.items()}
        files.write_text(path, json.dumps(tree))
    else:
        path.unlink(missing_ok=True)


def check_tasks(run: Path, tasks: Mapping[int, Sequence[str]]) -> None:
    """Refuse a sweep in the run directory of another one, whose results would count as its own.

    Raises:
        UserError: a task that has begun has other options.
    """
    for number, words in read_tasks(run).items():
        same = tasks.get(int(number), words) == words
        if tasks and not same and (run / f"task-{number}").exists():
            raise UserError(
                f"{run} has another sweep, whose task {number} has {' '.join(words)}",
                "give another --run.dir",
            )


def read_tasks(run: Path) -> dict[str, list[str]]:
    """The options of each task of a sweep, by its number."""
    with suppress(OSError, ValueError):
        return dict(json.loads((run / TASKS).read_text()))
    return {}


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
            found = ", ".join(f"{job.id} ({job.state})" for job in jobs)
            raise UserError(
                f"{run} has a job already: {found}",
                f"wait for its end, or end it by `hpc-train cancel --now {run}`, or give another "
                "run.dir",
            )
        yield
