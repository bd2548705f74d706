"""This machine alone, without a scheduler: the same script, for trying out and for tests."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil

from hpc_train.config.durations import format_duration
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.host.process import begun_ticks
from hpc_train.launch import SchedulerName
from hpc_train.launch.protocol import QUEUED
from hpc_train.launch.schedulers.base import LEAVE, QueuedJob, Scheduler, outside

if TYPE_CHECKING:
    from hpc_train.launch.batch import BatchJob

# What a scheduler tells the job around this process, and no setting of the user's. A local job has
# this machine alone, but mpirun, too, would take the hosts of the job around it.
_OF_A_JOB = re.compile(
    r"SLURM_(?!CONF|CLUSTERS$|SUBMIT_|TMPDIR$)|SLURMD_"
    r"|PBS_(?!CONF_FILE$|EXEC$|HOME$|SERVER$|DEFAULT$|O_|JOBFS$|TMPDIR$)"
    r"|LSB_(?!DEFAULT)|FLUX_(JOB|ENCLOSING|TASK)_|K_MPI_JOB_ROLE$"
)
# A shell that gets SIGTERM if `timeout` is killed: prctl(2), PR_SET_PDEATHSIG. Otherwise the job
# would go on without a time limit, and under no id. Python ignores SIGPIPE and SIGXFSZ, and a shell
# that begins so cannot undo it.
BASH = (
    sys.executable,
    "-ISc",
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, 15); "
    "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGPIPE, signal.SIGXFSZ)]; "
    "os.execvp('bash', ['bash', *sys.argv[1:]])",
)
KILL_AFTER = 30  # seconds between SIGTERM and SIGKILL at the time limit


class Local(Scheduler):
    """Runs the script on this machine at once, below `timeout`, which ends it at its time limit.

    A job's id has its process, the time of the process's start in ticks of the kernel, and the
    host, as in 4711-123456@node1. So an id never stands for a later process.
    """

    name: SchedulerName = "local"
    template = "local.sh"
    submits = ("timeout",)
    ids_come_back = False
    tells_hosts = False
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("account", "queue", "qos", "constraint", "reservation", "exclusive", "mail"),
            *("resources", "directive", "gpus", "memory", "chain", "tasks_at_once"),
        ),
        LEAVE,
    )

    def directives(self, batch: BatchJob) -> list[str]:
        """None: nobody would read them.

        Raises:
            UserError: the job has several nodes.
        """
        if batch.resources.nodes > 1:
            raise UserError("--nodes is above 1, and this machine is one node", "leave it out")
        return []

    def settings(self, batch: BatchJob) -> list[str]:
        """The lines that set the time limit, the file of the output, and what starts the script."""
        output = f"output={shlex.quote(_output(batch))}"
        return [*super().settings(batch), output, f"starter=({shlex.join(BASH)})"]

    def queue(self, batch: BatchJob, after: str = "") -> list[str]:
        """Start the script of a job, once for each task of a sweep; returns the ids."""
        words = ["timeout", "--signal=TERM", f"--kill-after={KILL_AFTER}"]
        words += [str(batch.resources.seconds), *BASH, batch.script]
        ids, ours = [], outside(os.environ)
        ours = {name: value for name, value in ours.items() if not _OF_A_JOB.match(name)}
        for task in range(len(batch.sweep)) if batch.sweep else [""]:
            environ = {**ours, "HPC_TRAIN_TASK": str(task)}
            with Path(_output(batch)).open("ab") as output:
                process = subprocess.Popen(
                    words,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ids.append(f"{process.pid}-{begun_ticks(process.pid) or ''}@{socket.gethostname()}")
        return ids

    def queued(self, ids: Sequence[str]) -> list[QueuedJob]:
        """The jobs of these that run.

        Raises:
            HpcTrainError: one of them was started on another host.
        """
        here, found = socket.gethostname(), []
        for job in ids:
            process, ticks, host = _parts(job)
            if host != here:
                raise HpcTrainError(
                    f"job {job} was started on {host}, and this is {here}",
                    f"ask on {host}, or remove {QUEUED} of the run directory if no job is left",
                )
            with suppress(psutil.NoSuchProcess):
                if ticks and str(begun_ticks(process)) == ticks:
                    elapsed = int(time.time() - psutil.Process(process).create_time())
                    found.append(QueuedJob(job, "RUNNING", "", format_duration(elapsed), host))
        return found

    def delete(self, ids: Sequence[str]) -> None:
        """Send SIGTERM to jobs; `timeout` sends SIGKILL after KILL_AFTER seconds."""
        for job in self.queued(ids):
            with suppress(ProcessLookupError):
                os.kill(_parts(job.id)[0], signal.SIGTERM)


def _output(batch: BatchJob) -> str:
    return f"{batch.outputs}{batch.name}.out"


def _parts(job: str) -> tuple[int, str, str]:
    """The process, the ticks and the host of an id."""
    process, _, rest = job.partition("-")
    ticks, _, host = rest.partition("@")
    return int(process), ticks, host
