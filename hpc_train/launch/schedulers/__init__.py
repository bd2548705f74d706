"""Schedulers, a module each: what a job asks of it, and how its jobs are found and ended later.

base.py has what they share. Each has a template of its own in jobscripts/templates.
"""

from __future__ import annotations

import shutil
from typing import Final

from hpc_train.errors import UserError
from hpc_train.launch import SchedulerName
from hpc_train.launch.schedulers.base import QueuedJob, Scheduler
from hpc_train.launch.schedulers.flux import Flux
from hpc_train.launch.schedulers.kubernetes import MpiJob
from hpc_train.launch.schedulers.local import Local
from hpc_train.launch.schedulers.lsf import Lsf
from hpc_train.launch.schedulers.pbs import Pbs, Torque
from hpc_train.launch.schedulers.slurm import Slurm

__all__ = ["QueuedJob", "Scheduler", "scheduler_here", "scheduler_of"]

# In the order in which they are looked for on a machine. Flux may run inside of the others.
_ALL: Final = (Slurm(), Pbs(), Torque(), Lsf(), Flux(), MpiJob(), Local())
_FOUND: Final = ("slurm", "pbs", "lsf", "flux")


def scheduler_of(name: str) -> Scheduler:
    """The scheduler of a name that --scheduler can have."""
    return next(scheduler for scheduler in _ALL if scheduler.name == name)


def scheduler_here() -> SchedulerName:
    """The name of this machine's scheduler, by the command that queues a job.

    Raises:
        UserError: there is none.
    """
    commands = {name: scheduler_of(name).submits[0] for name in _FOUND}
    for name, command in commands.items():
        if shutil.which(command):
            return scheduler_of(name).name
    raise UserError(
        f"no scheduler is here: none of {', '.join(commands.values())} is on the PATH",
        "give --scheduler or --site; --scheduler local needs none",
    )
