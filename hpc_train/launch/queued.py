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
from types import MappingProxyType
from typing import Any, get_args

from hpc_train import files
from hpc_train.errors import UserError
from hpc_train.launch import SchedulerName
from hpc_train.launch.protocol import QUEUED
from hpc_train.launch.schedulers import QueuedJob, Scheduler, scheduler_of

TASKS = "tasks.json"  # in the run directory of a sweep: the options of each task


def tasks_records(run: Path) -> dict[int, int]:
    """The number of records that each task of a run has in its own folder, by the task's number."""
    found = {path.parent.name[5:]: path for path in run.glob(f"task-*/{QUEUED}")}
    return {int(n): len([*files.lines_of(found[n])]) for n in found if n.isdecimal()}


def record_queued(
    run: Path,
    scheduler: SchedulerName,
    job: str,
    task: int | None = None,
    before: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Record that a job of the run was queued, or one of a task alone.

    Args:
        run: its directory.
        scheduler: the scheduler that was given the job.
        job: its id.
        task: the number of the task; None: the job is for the run, or for all of its tasks.
        before: the `tasks_records` from before it was queued. They tell which records are older
            than the job; times do not, because the clocks of hosts differ.
    """
    line: dict[str, Any] = {"time": int(time.time()), "event": "queued", "job": job}
    line["scheduler"] = scheduler
    if task is not None:
        line["task"] = task
    if older := {n: count for n, count in before.items() if task in (None, n)}:
        line["before"] = older
    files.append_record(run / QUEUED, line)


def read_events(run: Path) -> list[dict[str, Any]]:
    """The lines of jobs.jsonl of a run and its tasks; a line that cannot be read is left out."""
    folders = (run, *sorted(run.glob("task-*")))
    return [event for folder in folders for event in files.lines_of(folder / QUEUED)]


def task_events(run: Path, task: int) -> list[dict[str, Any]]:
    """The records of a task in their order: its submissions, and what is in its own folder."""
    own, found, older = read_events(run / f"task-{task}"), list[dict[str, Any]](), 0
    for event in files.lines_of(run / QUEUED):
        if event.get("event") == "queued" and event.get("task", task) == task:
            begin, older = older, max(older, (event.get("before") or {}).get(str(task), 0))
            found += [*own[begin:older], event]
    return [*found, *own[older:]]


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
    """The tasks that an id of an array stands for: 7_3, 7_[0-2,5,8-20:4%2], 7[3].server; or none.

    A range with a step, as 8-20:4, stands for 8, 12, 16 and 20.
    """
    found = re.match(r"\d+(?:_(\d+)$|_?\[([\d,:-]+))", job)
    ranges = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", (found[1] or found[2]) if found else "")
    return [
        task for a, b, step in ranges for task in range(int(a), int(b or a) + 1, int(step or 1))
    ]


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
    """The options of each task of a sweep, by its number; none that cannot be read."""
    tree: dict[str, Any] = {}
    with suppress(OSError):
        tree = files.parsed_object((run / TASKS).read_bytes()) or {}
    return {
        number: [str(word) for word in words]
        for number, words in tree.items()
        if number.isdecimal() and isinstance(words, list)
    }


@contextmanager
def one_submission(run: Path) -> Iterator[None]:
    """Keep other submissions of a run waiting, where the file system has locks.

    Raises:
        UserError: a job of the run is queued or runs.
        HpcTrainError: the scheduler does not say.
    """
    with (run / QUEUED).open("a", encoding="utf-8") as file:
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
