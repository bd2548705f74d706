"""A batch job: all that its script has to have, whichever scheduler reads it.

`templates.py` writes the script, and `schedulers/` has the directives of each scheduler.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpc_train.launch import SchedulerName
from hpc_train.launch.resources import Resources
from hpc_train.launch.schedulers import scheduler_of
from hpc_train.launch.staged import Staging


@dataclass(frozen=True)
class BatchJob:
    """A batch job.

    Args:
        scheduler: the scheduler that reads the script.
        name: job name.
        resources: what it asks the scheduler for.
        command: the command of each rank.
        run_dir: run directory; a file STOP in it ends the run.
        launcher: the launcher's line, which stands before the command.
        script: absolute path that the script will have.
        requeue_by: how the job is queued again when it has stopped early.
        max_requeues: maximum number of requeues.
        environ: variables for the job.
        setup: shell lines that load modules, each a command by itself. The job ends if one of them
            fails.
        sweep: for each task of a sweep, the arguments that it adds to the command. Each task has a
            run directory of its own.
        tasks_at_once: most tasks of a sweep that run at the same time; 0 sets no limit.
        stops_itself: whether the program finds the job's end and stops in time, as `train` does.
        image: container image, for mpijob.
        staging: what the job copies to its nodes before the ranks start; None for nothing.
        configuration: text of the configuration, for mpijob.
        commands: paths of the scheduler's commands, by name, as `find_commands` gives them.
        here: write the job's output into the working directory, because the run directory may not
            exist yet.
    """

    scheduler: SchedulerName
    name: str
    resources: Resources
    command: Sequence[str]
    run_dir: str
    launcher: Sequence[str]
    script: str
    requeue_by: Literal["requeue", "submit", "never"] = "requeue"
    max_requeues: int = 50
    environ: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[str] = ()
    sweep: Sequence[Sequence[str]] = ()
    tasks_at_once: int = 0
    stops_itself: bool = False
    image: str = ""
    staging: Staging | None = None
    configuration: str = ""
    commands: Mapping[str, str] = field(default_factory=dict)
    here: bool = False

    @property
    def outputs(self) -> str:
        """The folder of the job's output, with a slash behind it; "" is the working directory."""
        return "" if self.here else f"{self.run_dir}/"

    @property
    def limit(self) -> str:
        """The end of an array's range that limits the tasks at the same time."""
        return f"%{self.tasks_at_once}" if self.tasks_at_once else ""

    @property
    def survives(self) -> bool:
        """Whether the job goes on without a node that fails: `hpc-train launch` starts it."""
        words = {Path(word).name for word in self.launcher}
        return "launch" in words and not words.isdisjoint(("hpc-train", "hpc_train"))


def find_commands(scheduler: SchedulerName) -> dict[str, str]:
    """Paths here of the commands that a job's script calls. A job's PATH may lack them."""
    used = scheduler_of(scheduler).commands
    found = {name: shutil.which(name) for name in used}
    return {name: path for name, path in found.items() if path}


def text(batch: BatchJob) -> str:
    """The script, or the manifest, of a batch job.

    Raises:
        UserError: a value has characters that a directive cannot have.
    """
    return scheduler_of(batch.scheduler).text(batch)
