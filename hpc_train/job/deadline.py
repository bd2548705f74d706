"""Find out from the scheduler when this process's batch job ends.

One rank asks, once, before MPI is started: a process that has MPI must not start others.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress

from hpc_train.config.durations import parse_duration
from hpc_train.errors import UserError
from hpc_train.host import programs
from hpc_train.launch.protocol import DEADLINE, seconds_to_end
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
SCHEDULER_PATIENCE = 20.0  # seconds to wait for the scheduler's answer


def note_end() -> None:
    """Set DEADLINE to the end of this process's batch job, in seconds since 1970, if it has one."""
    if DEADLINE not in os.environ and (end := ask_end(os.environ)) is not None:
        os.environ[DEADLINE] = str(int(end))


def of_job(group: Group, margin: float | None = None) -> float | None:
    """When training must be over, in seconds since 1970; None without a limit. Collective.

    Args:
        group: all ranks of the job.
        margin: seconds between that and the end of the job, which rank 0 has noted; None: as long
            as the launcher and the script of so many ranks need.

    Raises:
        UserError: DEADLINE is set to something that is no number.
    """
    noted = group.from_first(lambda: os.environ.get(DEADLINE))
    if not noted:
        if group.rank == 0 and any(name in os.environ for name in JOB_IDS):
            logger.info(
                "the end of this job is not known, so the run does not stop before it: "
                "give run.time_limit (time_limit of a Loop), or set %s",
                DEADLINE,
            )
        return None
    with suppress(ValueError):
        if not math.isnan(end := float(noted)):
            return end - (seconds_to_end(group.size) if margin is None else margin)
    raise UserError(f"{DEADLINE} is {noted!r}", "set it to the job's end in seconds since 1970")


def ask_end(environ: Mapping[str, str]) -> float | None:
    """The end of the job in seconds since 1970; None without a job, a limit or an answer."""
    if "SLURM_JOB_ID" in environ:
        if environ.get("SLURM_JOB_END_TIME", "").isdigit():  # newer SLURMs set it
            return float(environ["SLURM_JOB_END_TIME"])
        # The last task of an array has the array's id, and a heterogeneous job that of its first
        # component: the answer has a line for each task or component.
        own = environ["SLURM_JOB_ID"]
        words = ("squeue", "-h", "-j", own, "-o", "%A %L")
        told = programs.output(*words, timeout=SCHEDULER_PATIENCE)
        found = re.search(rf"^{own} +(\S+)", told, re.MULTILINE)
        text = found[1] if found else ""
        # squeue leaves out the hours of less than one, and says UNLIMITED where there is no limit.
        left = parse_duration(f"0:{text}" if text.count(":") == 1 else text)
        return None if left is None else time.time() + left
    if "PBS_JOBID" in environ:
        return pbs_end(
            programs.output("qstat", "-f", environ["PBS_JOBID"], timeout=SCHEDULER_PATIENCE)
        )
    return None


def pbs_end(text: str) -> float | None:
    """The end of a job that `qstat -f` describes, its start plus its walltime; seconds since 1970.

    PBS Pro calls the start `stime`, Torque `start_time`; both write it as ctime does.
    """
    limit = re.search(r"Resource_List\.walltime = (\S+)", text)
    begin = re.search(r"^\s*(?:stime|start_time) = (.+)", text, re.MULTILINE)
    length = parse_duration(limit[1]) if limit else None
    if length is None or not begin:
        return None
    with suppress(ValueError):
        return time.mktime(time.strptime(begin[1].strip(), "%a %b %d %H:%M:%S %Y")) + length
    return None
