"""`hpc-train status --json`: where a run is, for programs such as a centre's portal."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_train.errors import HpcTrainError
from hpc_train.launch import queued
from hpc_train.launch.alive import state_in_words
from hpc_train.launch.protocol import STOP
from hpc_train.launch.recent import RecentRecords
from hpc_train.launch.status import check_run, newest_checkpoint, spent_by, task_folders

MEDIANS = (
    "step_seconds",
    "tokens_per_second",
    "samples_per_second",
    "comm_seconds",
    "data_seconds",
)


def status_tree(run: Path) -> dict[str, Any]:
    """A run's jobs, its state and that of its tasks, in seconds, joules and node-hours.

    A value is None if it is not known.

    Args:
        run: its directory.

    Raises:
        UserError: there is no such run.
    """
    check_run(run)
    error, jobs = None, None
    try:
        jobs = [asdict(job) for job in queued.still_queued(run)[1]]
    except HpcTrainError as problem:
        error = problem.cause
    scheduler, _ = queued.jobs_of(run)
    ends = [event for event in queued.read_events(run) if event.get("event") == "ended"]
    options, folders = queued.read_tasks(run), task_folders(run)
    tasks = dict.fromkeys([*(f"task-{number}" for number in options), *(f.name for f in folders)])
    return {
        "run": str(run),
        "scheduler": None if scheduler is None else scheduler.name,
        "jobs": jobs,
        "scheduler_error": error,
        **_progress(run),
        "costs": {name: value or None for name, value in asdict(spent_by(run)).items()},
        "last_end": ends[-1] if ends else None,
        "stop_file": (run / STOP).exists(),
        "tasks": [
            {"task": name, "options": options.get(name.removeprefix("task-"), [])}
            | _progress(run / name)
            for name in tasks
        ],
    }


def _progress(directory: Path) -> dict[str, Any]:
    """How far the run or the task in a directory is."""
    recent = RecentRecords(directory)
    checkpoint = newest_checkpoint(directory)
    return {
        "state": state_in_words(directory) or None,
        "step": recent.last.get("step"),
        "steps": recent.steps or None,
        "loss": _known(recent.last.get("loss")),
        "recorded": recent.written,
        **{key: _known(recent.typical(key)) for key in MEDIANS},
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def _known(value: object) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None
