"""Find out which job and which launcher this process belongs to, and which jobs still run.

One rank asks the scheduler before MPI is started, because a process that has MPI must not start
others. The directory to claim is not known by then, so it asks for all jobs of the user.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from hpc_train.checkpoint.owner import Jobs, ProcessPlace
from hpc_train.host import programs
from hpc_train.job.deadline import SCHEDULER_PATIENCE
from hpc_train.launch.protocol import LAUNCH, RESTARTS

JOBS = "HPC_TRAIN_JOBS"  # the answer that `note_jobs` has got


def own_place(environ: Mapping[str, str]) -> ProcessPlace:
    """The job of the scheduler, and the attempt of the launcher, that this process belongs to."""
    return ProcessPlace(
        _name(environ),
        int(environ.get("SLURM_RESTART_COUNT") or 0),
        environ.get(LAUNCH, ""),
        int(environ.get(RESTARTS) or 0),
    )


def _name(environ: Mapping[str, str]) -> str:
    if number := environ.get("SLURM_JOB_ID"):
        return f"slurm:{environ.get('SLURM_CLUSTER_NAME', '')}:{number}"
    if number := environ.get("PBS_JOBID"):
        return f"pbs::{number}"
    if number := environ.get("LSB_JOBID"):
        return f"lsf::{number}[{environ.get('LSB_JOBINDEX', '0')}]"
    if number := environ.get("FLUX_JOB_ID"):
        return f"flux::{number}"
    return ""


def note_jobs() -> None:
    """Ask the scheduler for jobs, if this process is in one, and keep the answer for `known`."""
    names = ask_jobs(os.environ)
    os.environ.pop(JOBS, None)  # it may be the answer to another process
    if names is not None:
        os.environ[JOBS] = json.dumps([time.time(), sorted(names)])


def known() -> Jobs | None:
    """The user's jobs, as the scheduler says now, or as it said before MPI was started."""
    if "mpi4py.MPI" not in sys.modules:
        note_jobs()
    with suppress(ValueError, TypeError, KeyError):
        when, names = json.loads(os.environ[JOBS])
        return Jobs(frozenset(names), max(0.0, time.time() - when))
    return None


def ask_jobs(environ: Mapping[str, str]) -> frozenset[str] | None:
    """The user's jobs that run or are ending; None without a scheduler or an answer."""
    own = _name(environ)
    if "SLURM_JOB_ID" in environ:
        lines = _lines("squeue", "-h", "-u", _user(), "-o", "%A %T")
    elif "PBS_JOBID" in environ:
        lines = _lines("qselect", "-u", _user(), "-s", "RES")
    else:
        return None
    scheduler = own.rpartition(":")[0]
    running = [line.split() for line in lines if line.split()[1:] != ["PENDING"]]
    names = frozenset(f"{scheduler}:{words[0]}" for words in running if words)
    return names if own in names else None  # an answer without this job cannot be right


def _user() -> str:
    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def _lines(*words: str) -> list[str]:
    return programs.output(*words, timeout=SCHEDULER_PATIENCE, needs_success=True).splitlines()
