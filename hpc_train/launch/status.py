"""`hpc-train status` and `hpc-train logs`: what the jobs of a run do, and what they print."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import HpcTrainError, UserError, print_line
from hpc_train.launch import queued
from hpc_train.launch.alive import job_runs, state_in_words
from hpc_train.launch.protocol import QUEUED, STOP
from hpc_train.launch.recent import RecentRecords
from hpc_train.monitoring.spent import SpentCosts, costs_in, describe_joules
from hpc_train.times import time_text

DEPTHS = ("*", "*/*", "*/*/*")  # where `status` looks for runs below the working directory
# Names of job outputs: SLURM's by our directive, OpenPBS's in a folder, and Torque's.
OUTPUTS = ("*.out", "*.OU", "*.o[0-9]*")
FOLLOW_SECONDS = 0.5
ASK_SECONDS = 30.0  # between two questions to the scheduler while following or watching
SURE_SECONDS = 3.0  # after which it is asked again if no job was there, as one may come back


def find_runs(below: Path) -> list[Path]:
    """Run directories, at most three levels below a folder, whose jobs are recorded."""
    found = {path.parent for depth in DEPTHS for path in below.glob(f"{depth}/{QUEUED}")}
    return sorted(path for path in found if not path.name.startswith("task-"))


class RunStatus:
    """Says where a run is, as often as one likes.

    Args:
        run: its directory.

    Raises:
        UserError: there is no such run.
    """

    def __init__(self, run: Path) -> None:
        check_run(run)
        self.run = run
        self._jobs: list[str] = []
        self._asked = -ASK_SECONDS

    def lines(self, curves: int = 0) -> list[str]:
        """The run's jobs, its state, step, speed and checkpoint, its costs, and how a job ended.

        Args:
            curves: the characters of a curve of the last records; with 0 none is drawn.
        """
        if time.monotonic() - self._asked >= ASK_SECONDS:
            self._jobs, self._asked = _jobs(self.run), time.monotonic()
        found = [*self._jobs, *_progress(self.run, curves), *_costs(self.run), *_end(self.run)]
        return found or ["no job of it is in the queue, and none has begun"]


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
        return []
    lines = [
        " ".join(
            word for word in ("job", job.id, job.state, job.elapsed, job.hosts, job.why) if word
        )
        for job in jobs
    ]
    return lines or ["no job in the queue"]


def _progress(run: Path, curves: int) -> list[str]:
    lines: list[str] = []
    options, folders = queued.read_tasks(run), task_folders(run)
    for directory in (run, *folders):
        words = options.get(directory.name.removeprefix("task-"), [])
        before = f"{' '.join([directory.name, *words])}: " if directory != run else ""
        state = state_in_words(directory)
        lines += [f"{before}{state}"] if state else []
        recent = RecentRecords(directory)
        if record := recent.last:
            loss = ""
            if "loss" in record:
                value = recent.values("loss")[-1]
                loss = f", loss {value:.6g}" if math.isfinite(value) else ", loss not finite"
            age = time_text(max(0, round(time.time() - (recent.written or 0.0))))
            lines.append(f"{before}step {record.get('step')}{loss}, recorded {age} ago")
            lines += [f"{before}{line}" for line in recent.lines(state)]
            lines += [f"{before}{line}" for line in recent.curves(curves)] if curves else []
        for latest in _latest(directory):
            newest = _named_by(latest)
            lines.append(
                f"{before}newest checkpoint: {newest.name}"
                if newest
                else f"{before}{latest} names no checkpoint that is there"
            )
    begun = {folder.name.removeprefix("task-") for folder in folders}
    lines += [
        f"task-{number} {' '.join(words)}: has not begun"
        for number, words in options.items()
        if number not in begun
    ]
    return lines


def task_folders(run: Path) -> list[Path]:
    """The run directories of a sweep's tasks that have begun, in their order."""
    return sorted(run.glob("task-*"), key=lambda path: (len(path.name), path.name))


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint of a run, or of a task, that was completed last."""
    return next((path for latest in _latest(directory) if (path := _named_by(latest))), None)


def _latest(directory: Path) -> list[Path]:
    """The files LATEST of a run that are there: a Trainer's, and a Loop's."""
    return [f for name in ("checkpoints/LATEST", "LATEST") if (f := directory / name).is_file()]


def _named_by(latest: Path) -> Path | None:
    """The checkpoint that a file LATEST names; None if it is not there."""
    with suppress(OSError, ValueError):  # ValueError: a name that no file can have
        name = latest.read_text(encoding="utf-8", errors="replace").strip()
        return latest.parent / name if name and (latest.parent / name).is_file() else None
    return None


def _costs(run: Path) -> list[str]:
    """What the run or all tasks of a sweep have cost.

    If no energy was measured, the scheduler is asked for it.
    """
    spent = spent_by(run)
    if not spent.node_hours:
        return []
    line = f"cost: {spent.describe()}"
    scheduler, jobs = queued.jobs_of(run)
    if not spent.joules and scheduler is not None and jobs and (joules := scheduler.joules(jobs)):
        line += f", and {scheduler.name} accounts for {describe_joules(joules)}"
    return [line]


def spent_by(run: Path) -> SpentCosts:
    """What the run or all tasks of a sweep have cost."""
    return sum(map(costs_in, (run, *task_folders(run))), SpentCosts())


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
        position, asked, quiet = 0, -ASK_SECONDS, 0 if follow else 2
        while True:
            position = _print_from(path, position)  # after the answer: it takes seconds
            newer = log_of(run, rank)
            if newer != path:
                _print_from(path, position)
                path, position = newer, 0
                continue
            if quiet == 2:  # answers in a row that no job is there
                return
            if time.monotonic() - asked > (SURE_SECONDS if quiet else ASK_SECONDS):
                quiet = quiet + 1 if _over(run) else 0
                asked = time.monotonic()
            else:
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
            print_line(f"hpc-train logs: waiting for the output of job {words}", sys.stderr)
            asked = time.monotonic()
        time.sleep(FOLLOW_SECONDS)


def _over(run: Path) -> bool:
    """Whether no job of the run is left in the queue; without a scheduler, whether none runs."""
    with suppress(HpcTrainError):  # it may answer the next time
        scheduler, jobs = queued.still_queued(run)
        return job_runs(run) is False if scheduler is None else not jobs
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
        found = (found.name for found in (run / "logs").glob("rank-*.log"))
        logs = sorted(found, key=lambda name: (len(name), name))
        there = "no job of the run has begun yet"
        if logs:
            there = f"there are {logs[0]} to {logs[-1]}" if len(logs) > 1 else f"there is {logs[0]}"
        raise UserError(f"there is no {path}", there)
    return path
