"""Flux. Sources: flux-batch(1), flux-jobs(1), flux-cancel(1) and tests of flux-core 0.88."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from hpc_train.launch import SchedulerName
from hpc_train.launch.schedulers.base import (
    LEAVE,
    QueuedJob,
    Scheduler,
    ask,
    expression,
    given,
    output_folder,
    silent,
    submitted,
    word,
)

if TYPE_CHECKING:
    from hpc_train.launch.batch import BatchJob
    from hpc_train.launch.resources import Resources

_STATES = {"DEPEND": "PENDING", "PRIORITY": "PENDING", "SCHED": "PENDING", "RUN": "RUNNING"}
_OVER = ("COMPLETED", "FAILED", "CANCELED", "TIMEOUT")
_FIELDS = "{id.f58plain}|{status}|{contextual_info}|{runtime!H}|{nodelist}"


class Flux(Scheduler):
    """Flux: a job of its own for each task of a sweep, because batch jobs have no arrays."""

    name: SchedulerName = "flux"
    template = "flux.sh"
    sign = "# flux:"
    commands = ("flux",)
    # The time limit is reached: ALRM. `flux cancel`: TERM. The broker sends HUP beside them.
    late = ("TERM", "ALRM", "HUP")
    submits = ("flux", "batch")
    id_line = "()([A-Za-z0-9]+)"
    deletes = ("flux", "cancel")
    warns = True
    refused: ClassVar[Mapping[str, str]] = {
        "qos": LEAVE,
        "tasks_at_once": LEAVE,
        "reservation": LEAVE,
        "mail": LEAVE,
        "memory": LEAVE,
        "resources": "give --gpus, --constraint or --directive",
    }

    def directives(self, batch: BatchJob) -> list[str]:
        """The directives of flux batch. One slot is a whole node's part of the job."""
        asked = batch.resources
        lines = [
            f"--job-name={word('the name', batch.name)}",
            f"--nodes={asked.nodes}",
            f"--nslots={asked.nodes}",
            f"--cores-per-slot={asked.ranks_per_node * asked.threads}",
            f"--time-limit={asked.seconds}s",
            f"--output={output_folder(batch)}{batch.name}-{{{{id}}}}.out",
            "-o output.mode=append",
        ]
        if notice := self.notice(batch):
            lines.append(f"--signal=USR1@{notice}s")
        lines += given(
            {
                "--gpus-per-slot=": str(asked.gpus or ""),
                "--bank=": asked.account and word("--account", asked.account),
                "--queue=": asked.queue and word("--queue", asked.queue),
                "--requires=": asked.constraint and expression("--constraint", asked.constraint),
            }
        )
        return [*lines, *["--exclusive"] * asked.exclusive]

    def settings(self, batch: BatchJob) -> list[str]:
        """Nothing: Flux says how much time is left."""
        return []

    def launch_words(self, asked: Resources, environ: Mapping[str, str]) -> list[str]:
        """The ranks of a host, which Flux does not know."""
        return ["--ranks_per_node", str(asked.ranks_per_node)]

    def queue(self, batch: BatchJob, after: str = "") -> list[str]:
        """Queue the script of a job, once for each task of a sweep; returns the ids."""
        words = [*self.submits, *(self.chained(after) if after else ()), batch.script]
        tasks = range(len(batch.sweep)) if batch.sweep else [""]
        environ = {"FLUX_F58_FORCE_ASCII": "1"}  # other programs may not read the letter of its ids
        return [
            self.id_of(submitted(words, environ=environ | {"HPC_TRAIN_TASK": str(task)}))
            for task in tasks
        ]

    def chained(self, after: str) -> list[str]:
        """The words for a job that waits for another one. Flux ends those that wait in vain."""
        return [f"--dependency=afternotok:{after}"]

    def queued(self, ids: Sequence[str]) -> list[QueuedJob]:
        """The jobs of these that wait in the queue or run."""
        done = ask(["flux", "jobs", "-n", "-o", _FIELDS, *ids])
        if any("unknown" not in line for line in done.stderr.splitlines() if line.strip()):
            raise silent(done)
        found = []
        for line in done.stdout.splitlines():
            job, state, why, elapsed, hosts = (*line.strip().split("|"), *[""] * 5)[:5]
            if state and state not in _OVER:
                waits = state in _STATES and _STATES[state] == "PENDING"
                found.append(QueuedJob(job, _STATES.get(state, state), why * waits, elapsed, hosts))
        return found
