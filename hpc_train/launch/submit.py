"""`hpc-train submit`: write a job's script into its run directory, and queue it."""

from __future__ import annotations

import shutil
from pathlib import Path

from hpc_train.errors import SetupError, UserError
from hpc_train.launch.batch import text
from hpc_train.launch.compose import COPY, make
from hpc_train.launch.protocol import STOP
from hpc_train.launch.queued import one_submission, record_queued
from hpc_train.launch.request import SubmitRequest
from hpc_train.launch.schedulers import scheduler_of


def submit(request: SubmitRequest) -> list[str]:
    """Write a job's script and queue it; returns the ids of the queued jobs.

    The script stays in the run directory, as job.sh or mpijob.yaml. So does a copy of the
    configuration, job.yaml, which the job reads: later changes of the original do not matter.

    Raises:
        UserError: the request cannot be met, or a job of the run is queued or runs already.
        HpcTrainError: the scheduler refuses the job.
    """
    batch = make(request)
    script = text(batch)
    if request.dry_run:
        print(script, end="")
        return []
    scheduler = scheduler_of(batch.scheduler)
    if not shutil.which(scheduler.submits[0]):
        raise SetupError(
            f"{scheduler.submits[0]} is not here",
            "submit from a login node, or look at the script with --dry_run",
        )
    run_dir = Path(batch.run_dir)
    if (run_dir / STOP).exists():
        raise UserError(f"{run_dir / STOP} is there", "remove it to resume the run")
    run_dir.mkdir(parents=True, exist_ok=True)
    ids: list[str] = []
    with one_submission(run_dir):
        if request.config:
            (run_dir / COPY).write_bytes(Path(request.config).read_bytes())
        path = Path(batch.script)
        path.write_text(script)
        path.chmod(0o755)
        for _ in range(request.chain):
            for job in scheduler.queue(batch, after=ids[-1] if ids else ""):
                ids.append(job)
                record_queued(run_dir, batch.scheduler, job)
    return ids
