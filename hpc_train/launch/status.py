"""`hpc-train status` and `hpc-train logs`: what the jobs of a run do, and what they print."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.errors import HpcTrainError, UserError
from hpc_train.launch import queued
from hpc_train.launch.protocol import QUEUED, STOP
from hpc_train.monitoring.spent import costs_in, describe_joules

DEPTHS = ("*", "*/*", "*/*/*")  # where `status` looks for runs below the working directory
# Names of job outputs: SLURM's by our directive, OpenPBS's in a folder, and Torque's.
OUTPUTS = ("*.out", "*.OU", "*.o[0-9]*")
LAST_BYTES = 1 << 16  # of metrics.jsonl, in which its last record lies
FOLLOW_SECONDS = 0.5
ASK_SECONDS = 30.0  # between two questions to the scheduler while following


def find_runs(below: Path) -> list[Path]:
    """Run directories, at most three levels below a folder, whose jobs are recorded."""
    found = {path.parent for depth in DEPTHS for path in below.glob(f"{depth}/{QUEUED}")}
    return sorted(path for path in found if not path.name.startswith("task-"))


def describe(run: Path) -> list[str]:
    """Lines that say where a run is: its jobs, its step, its checkpoint, its costs, its end.

    Raises:
        UserError: there is no such run.
    """
    check_run(run)
    return [*_jobs(run), *_progress(run), *_costs(run), *_end(run)]


def check_run(run: Path) -> None:
    """Refuse a folder that is no run directory.

    Raises:
        UserError: it is none.
    """
    signs = (QUEUED, "config.yaml", "job.sh", "logs", "checkpoints", "metrics.jsonl")
    if not any((run / name).exists() for name in signs):
        raise UserError(f"{run} is not a run directory", "give the run.dir of a job")


def _jobs(run: Path) -> list[str]:
    try:
        scheduler, jobs = queued.still_queued(run)
    except HpcTrainError as error:
        return [error.cause]
    if scheduler is None:
        return [f"no job is recorded in {QUEUED}"]
    lines = [
        " ".join(
            word for word in ("job", job.id, job.state, job.elapsed, job.hosts, job.why) if word
        )
        for job in jobs
    ]
    return lines or ["no job in the queue"]


def _progress(run: Path) -> list[str]:
    lines, options = [], queued.read_tasks(run)
    folders = sorted(run.glob("task-*"), key=lambda path: (len(path.name), path.name))
    for directory in (run, *folders):
        words = options.get(directory.name.removeprefix("task-"), [])
        before = f"{' '.join([directory.name, *words])}: " if directory != run else ""
        record = _last_record(directory / "metrics.jsonl")
        if record:
            loss = f", loss {record['loss']:.6g}" if isinstance(record.get("loss"), float) else ""
            age = time.time() - (directory / "metrics.jsonl").stat().st_mtime
            lines.append(f"{before}step {record.get('step')}{loss}, recorded {age:.0f} s ago")
        with suppress(OSError):
            newest = (directory / "checkpoints/LATEST").read_text().strip()
            lines.append(f"{before}newest checkpoint: {newest}")
    return lines


def _costs(run: Path) -> list[str]:
    """What the run has cost, with the scheduler's energy if nothing else has read any."""
    spent = costs_in(run)
    if not spent.node_hours:
        return []
    line = f"cost: {spent.describe()}"
    scheduler, jobs = queued.jobs_of(run)
    if not spent.joules and scheduler is not None and jobs and (joules := scheduler.joules(jobs)):
        line += f", and {scheduler.name} accounts for {describe_joules(joules)}"
    return [line]


def _last_record(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        record = json.loads(file.read().splitlines()[-1])
        return record if isinstance(record, dict) else {}
    return {}


def _end(run: Path) -> list[str]:
    ends = [event for event in queued.read_events(run) if event.get("event") == "ended"]
    lines = []
    if ends:
        last = ends[-1]
        told = str(last.get("why") or "")
        why = f", {told}" if told and not told.startswith("exit code") else ""
        then = f", followed by {last['next']}" if last.get("next") else ""
        lines.append(f"job {last.get('job')} ended with exit code {last.get('code')}{why}{then}")
        if last.get("continue"):
            lines.append(f"to continue: {last['continue']}")
    if (run / STOP).exists():
        lines.append(f"{run / STOP} is there, which ends the run: remove it to resume")
    return lines


def show_log(run: Path, rank: int | None, *, follow: bool) -> None:
    """Print a log of a run.

    Args:
        run: its directory, or that of a task.
        rank: print the log of this rank; None prints the newest output of a job.
        follow: continue until no job of the run is in the queue, or until Ctrl-C.

    Raises:
        UserError: there is no such run, or no such log.
    """
    check_run(run)
    with suppress(KeyboardInterrupt):
        if follow:
            _wait_for_log(run, rank)
        path = log_of(run, rank)
        position, asked = 0, time.monotonic()
        while True:
            position = _print_from(path, position)
            over = not follow
            if follow and time.monotonic() - asked > ASK_SECONDS:
                over, asked = _over(run), time.monotonic()
            newer = log_of(run, rank)
            if newer != path:
                _print_from(path, position)
                path, position = newer, 0
            elif over:
                return
            time.sleep(FOLLOW_SECONDS)


def _wait_for_log(run: Path, rank: int | None) -> None:
    """Wait as long as a job of the run is in the queue, and there is no log yet."""
    asked = -ASK_SECONDS
    while True:
        with suppress(UserError):
            log_of(run, rank)
            return
        if time.monotonic() - asked > ASK_SECONDS:
            scheduler, jobs = queued.still_queued(run)
            if scheduler is None or not jobs:
                return
            words = " ".join(word for word in (jobs[0].id, jobs[0].state, jobs[0].why) if word)
            print(f"hpc-train logs: waiting for the output of job {words}", file=sys.stderr)
            asked = time.monotonic()
        time.sleep(FOLLOW_SECONDS)


def _over(run: Path) -> bool:
    """Whether the scheduler says that no job of the run is left."""
    with suppress(HpcTrainError):  # it may answer the next time
        scheduler, jobs = queued.still_queued(run)
        return scheduler is not None and not jobs
    return False


def _print_from(path: Path, position: int) -> int:
    """Print what a file has from a byte offset on; returns the offset of its end."""
    with path.open("rb") as file:
        file.seek(position)
        while text := file.read(1 << 20):
            sys.stdout.buffer.write(text)
        sys.stdout.flush()
        return file.tell()


def log_of(run: Path, rank: int | None) -> Path:
    """The file of the newest output of a run's jobs, or of the log of a rank.

    A task that has failed before its first log has its cause in the output of the whole run.

    Raises:
        UserError: there is none yet.
    """
    path = run / "logs" / f"rank-{rank or 0:03d}.log"
    of_task = run.name.startswith("task-") and not path.exists()
    for folder in (run, run.parent) if of_task else (run,):
        outputs = [path for pattern in OUTPUTS for path in folder.glob(pattern)]
        if rank is None and outputs:
            return max(outputs, key=lambda path: path.stat().st_mtime)
    if not path.exists():
        logs = sorted(found.name for found in (run / "logs").glob("rank-*.log"))
        there = f"there are {logs[0]} to {logs[-1]}" if logs else "no job of the run has begun yet"
        raise UserError(f"there is no {path}", there)
    return path
