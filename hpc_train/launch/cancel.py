"""`hpc-train cancel`: stop a run for good."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpc_train import files
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.launch.protocol import QUEUED, STOP


def cancel(run: Path, *, now: bool = False) -> str:
    """Stop a run for good: it writes a checkpoint, and is not queued again.

    Args:
        run: its directory.
        now: remove its jobs from the queue too, and end those that run.

    Returns:
        A line for the user that says what happens now.

    Raises:
        UserError: there is no such run, or none of its jobs is recorded, so that none can end now.
        HpcTrainError: the scheduler does not say which jobs there are, or does not end them.
    """
    tasks = [path for path in run.glob("task-*") if path.is_dir()]
    # The last two are those of a `Loop`, whose checkpoints lie in the directory itself.
    signs = ("config.yaml", "job.sh", "mpijob.yaml", "checkpoints", "LATEST", ".claim")
    made = [run / name for name in signs]
    if not tasks and not any(path.exists() for path in made):
        raise UserError(f"{run} is not a run directory", "give the run.dir of a job")
    found = _found(run) if now else []  # some may end by the file before they are ended below
    for directory in tasks:
        write_stop(directory)
    stopped = write_stop(run)
    if now:
        stopped = f"{run / STOP} written; {_ended(run, found)}; remove the file to resume"
    return f"{stopped}, and {run / 'task-*' / STOP}" if tasks else stopped


def write_stop(run: Path) -> str:
    """Write the file that stops a run or a task for good; returns a line that says what happens."""
    files.write_text(run / STOP, "")
    return (
        f"{run / STOP} written: the run stops with a checkpoint after its step, and is not queued "
        "again; a job that waits in the queue ends when it starts; remove the file to resume"
    )


def _found(run: Path) -> list[str]:
    """The jobs of a run in the queue; none if the scheduler does not answer."""
    from hpc_train.launch import queued  # here, because a plain `cancel` should start at once

    with suppress(HpcTrainError):  # the file has to be written all the same
        return [job.id for job in queued.still_queued(run)[1]]
    return []


def _ended(run: Path, found: list[str]) -> str:
    """End the jobs of a run; says which ones, and which of those found earlier have ended."""
    from hpc_train.launch import queued

    scheduler, jobs = queued.still_queued(run)
    if scheduler is None:
        raise UserError(
            f"{run / STOP} is written, but {run / QUEUED} names no job to end now",
            "end it by the scheduler's own command",
        )
    if ids := [job.id for job in jobs]:
        scheduler.delete(ids)
    gone = [*dict.fromkeys([*found, *ids])]
    if not gone:
        return "no job of the run is in the queue"
    return f"ended or removed from the queue: {', '.join(gone)}"
