"""`hpc-train cancel`: stop a run for good."""

from __future__ import annotations

from pathlib import Path

from hpc_train import files
from hpc_train.errors import UserError
from hpc_train.launch.protocol import STOP


def cancel(run: Path) -> str:
    """Stop a run for good: it writes a checkpoint, and is not queued again.

    Returns:
        A line for the user that says what happens now.

    Raises:
        UserError: there is no such run.
    """
    tasks = [path for path in run.glob("task-*") if path.is_dir()]
    made = [run / name for name in ("config.yaml", "job.sh", "job.yaml", "checkpoints")]
    if not tasks and not any(path.exists() for path in made):
        raise UserError(f"{run} is not a run directory", "give the run.dir of a job")
    for directory in (run, *tasks):
        files.write_text(directory / STOP, "")
    return (
        f"{run / STOP} written: the run stops with a checkpoint after its step, and is not queued "
        "again; a job that waits in the queue ends when it starts; remove the file to resume"
    )
