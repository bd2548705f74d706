"""`hpc-train submit`: write a job's script into its run directory, and queue it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_train import files
from hpc_train.errors import HpcTrainError, SetupError, UserError, print_line, remedy_for
from hpc_train.launch.batch import text
from hpc_train.launch.compose import COPY, make
from hpc_train.launch.protocol import QUEUED, STOP
from hpc_train.launch.queued import (
    check_tasks,
    one_submission,
    record_queued,
    tasks_records,
    write_tasks,
)
from hpc_train.launch.request import SubmitRequest
from hpc_train.launch.schedulers import scheduler_of


@dataclass(frozen=True)
class Submission:
    """What was submitted.

    Args:
        run_dir: its run directory.
        ids: the scheduler's ids of the queued jobs.
        first_task: the number of a sweep's first task.
    """

    run_dir: Path
    ids: list[str]
    first_task: int


def submit(request: SubmitRequest) -> Submission:
    """Write a job's script and queue it, or only print it.

    The script stays in the run directory, as job.sh or mpijob.yaml. So does a copy of the
    configuration, job.yaml, which the job reads: later changes of the original do not matter.

    Raises:
        UserError: the request cannot be met, or a job of the run is queued or runs already.
        HpcTrainError: the scheduler refuses the job.
    """
    batch = make(request)
    script = text(batch)
    scheduler = scheduler_of(batch.scheduler)
    run_dir = Path(batch.run_dir)
    if request.dry_run:
        print(script, end="")
        return Submission(run_dir, [], scheduler.first_task)
    if not shutil.which(scheduler.submits[0]):
        raise SetupError(
            f"{scheduler.submits[0]} is not here",
            "submit from a login node, or look at the script with --dry_run",
        )
    if (run_dir / STOP).exists():
        raise UserError(f"{run_dir / STOP} is there", "remove it to resume the run")
    with _writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / QUEUED).open("a", encoding="utf-8").close()  # it may be another user's
    ids: list[str] = []
    with one_submission(run_dir):
        tasks = dict(enumerate(map(list, batch.sweep), scheduler.first_task))
        check_tasks(run_dir, tasks)
        for stop in sorted(run_dir.glob(f"task-*/{STOP}")):
            print_line(
                f"hpc-train submit: {stop} is there, so this task does not start", sys.stderr
            )
        config = Path(request.config).read_bytes() if request.config else None
        with _writing(run_dir):
            # New files: the old ones may be another group member's, and a job may be reading them.
            if config is not None:
                files.write_whole(run_dir / COPY, [config])
            files.write_whole(Path(batch.script), [os.fsencode(script)], 0o777)
            write_tasks(run_dir, tasks)
        before = tasks_records(run_dir)
        for _ in range(request.chain):
            try:
                queued = scheduler.queue(batch, after=ids[-1] if ids else "")
            except HpcTrainError as error:
                those = f"; queued before that: {', '.join(ids)}" if ids else ""
                raise type(error)(f"{error.cause}{those}", error.remedy) from error
            for task, job in enumerate(queued, scheduler.first_task):
                alone = task if len(queued) > 1 else None
                record_queued(run_dir, batch.scheduler, job, alone, before)
            ids += queued
    return Submission(run_dir, ids, scheduler.first_task)


@contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    """Turn an error in writing to a run directory into a line for the user.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        yield
    except OSError as error:
        named = str(error.filename or run_dir)
        where = "" if named == str(run_dir) else f": {named}"
        raise UserError(
            f"run.dir {run_dir} cannot be written ({error.strerror}{where})",
            remedy_for(error, "give a directory of your own, or free space"),
        ) from None
