"""`hpc-train cancel`: stop a run for good."""

from __future__ import annotations

from pathlib import Path

from hpc_train import files
from hpc_train.errors import UserError
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
    for directory in tasks:
        write_stop(directory)
    stopped = write_stop(run)
    if now:
        stopped = f"{run / STOP} written; {_ended(run)}; remove the file to resume"
    return f"{stopped}, and {run / 'task-*' / STOP}" if tasks else stopped


def write_stop(run: Path) -> str:
    """Write the file that stops a run or a task for good; returns a line that says what happens."""
    files.write_text(run / STOP, "")
    return (
        f"{run / STOP} written: the run stops with a checkpoint after its step, and is not queued "
        "again; a job that waits in the queue ends when it starts; remove the file to resume"
    )


def _ended(run: Path) -> str:
    """End the jobs of a run; says which ones."""
    from hpc_train.launch import queued  # here, because a plain `cancel` should start at once

    scheduler, jobs = queued.still_queued(run)
    if scheduler is None:
        raise UserError(
            f"{run / STOP} is written, but {run / QUEUED} names no job to end now",
            "end it by the scheduler's own command",
        )
    if not jobs:
        return "no job of the run is in the queue"
    ids = [job.id for job in jobs]
    scheduler.delete(ids)
    return f"ended or removed from the queue: {', '.join(ids)}"
