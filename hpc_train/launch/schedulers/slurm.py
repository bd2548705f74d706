"""SLURM. Sources: sbatch(1), squeue(1), scancel(1), sinfo(1) and sacct(1) of Slurm 22.05."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from hpc_train.config.durations import format_duration
from hpc_train.errors import UserError
from hpc_train.host import programs
from hpc_train.launch import SchedulerName
from hpc_train.launch.schedulers.base import (
    NodeCores,
    QueuedJob,
    Scheduler,
    ask,
    expression,
    given,
    output_folder,
    silent,
    word,
)

if TYPE_CHECKING:
    from hpc_train.launch.batch import BatchJob

SINFO_SECONDS = 10.0  # seconds to wait for the scheduler's answer
_CLUSTERS = re.compile("--clusters\\b|-M")


class Slurm(Scheduler):
    """SLURM: `requeue` queues the same job again, and a job may go on without a lost node."""

    name: SchedulerName = "slurm"
    template = "slurm.sh"
    sign = "#SBATCH"
    commands = ("sbatch", "scontrol", "squeue")
    submits = ("sbatch", "--parsable")
    id_line = "(Submitted batch job )?([0-9]+)(;.*)?"  # the cluster's name follows a semicolon
    deletes = ("scancel",)
    requeues = True
    warns = True
    arrays = "SLURM_ARRAY_TASK_ID"
    gpu_option = "--gpus-per-node="
    refused: ClassVar[Mapping[str, str]] = {
        "resources": "give --gpus, --memory, --constraint or --directive"
    }

    def directives(self, batch: BatchJob) -> list[str]:
        """The directives of sbatch.

        Raises:
            UserError: a directive names another cluster.
        """
        asked = batch.resources
        if elsewhere := [line for line in asked.directives if _CLUSTERS.match(line)]:
            raise UserError(
                f"the directive {elsewhere[0]} would queue the job on another cluster, which "
                "`hpc-train status`, `cancel` and the job itself would not ask",
                "export SLURM_CLUSTERS in its place, which all commands of SLURM read",
            )
        number = "%A_%a" if batch.sweep else "%j"
        lines = [
            f"--job-name={word('the name', batch.name)}",
            f"--nodes={asked.nodes}",
            f"--ntasks-per-node={asked.ranks_per_node}",
            f"--cpus-per-task={asked.threads}",
            f"--time={format_duration(asked.seconds)}",
            f"--output={output_folder(batch).replace('%', '%%')}%x-{number}.out",
            "--open-mode=append",
            "--requeue",
        ]
        if batch.survives:
            lines.append("--no-kill")
        if notice := self.notice(batch):
            lines.append(f"--signal=B:USR1@{notice}")
        if asked.account:
            lines.append(f"--account={word('--account', asked.account)}")
        if asked.queue:
            lines.append(f"{asked.queue_option}={word('--queue', asked.queue)}")
        if batch.sweep:
            lines.append(f"--array=0-{len(batch.sweep) - 1}{batch.limit}")
        lines += given(
            {
                asked.gpu_option: str(asked.gpus or ""),
                "--mem=": f"{asked.memory_gb}G" if asked.memory_gb else "",
                "--qos=": _expression("--qos", asked.qos),
                "--constraint=": _expression("--constraint", asked.constraint),
                "--reservation=": _expression("--reservation", asked.reservation),
                "--mail-user=": _expression("--mail", asked.mail),
                "--mail-type=": "END,FAIL" if asked.mail else "",
            }
        )
        return [*lines, *["--exclusive"] * asked.exclusive]

    def settings(self, batch: BatchJob) -> list[str]:
        """The lines that set whether the job goes on without a lost node."""
        return [
            "# Whether the directive --no-kill is given: yes, or nothing.",
            f"no_kill={'yes' if batch.survives else ''}",
        ]

    def chained(self, after: str) -> list[str]:
        """The words for a job that waits for another one."""
        return [f"--dependency=afternotok:{after}", "--kill-on-invalid-dep=yes"]

    def queued(self, ids: Sequence[str]) -> list[QueuedJob]:
        """The jobs of these that wait in the queue or run."""
        # %i is 7_3 for task 3 of array 7, %A that task's own id, and %F 7.
        done = ask(["squeue", "-h", "-j", ",".join(ids), "-o", "%i|%A|%F|%T|%r|%M|%N"])
        if done.returncode and "Invalid job id" not in done.stderr:  # it has forgotten the only one
            raise silent(done)
        found = []
        for line in done.stdout.splitlines():
            name, task, array, state, why, elapsed, hosts = (*line.strip().split("|"), *[""] * 7)[
                :7
            ]
            if {name, task, array} & {*ids}:
                reason = "" if why == "None" else why
                found.append(QueuedJob(name, state, reason, elapsed, hosts))
        return found

    def delete(self, ids: Sequence[str]) -> None:
        """End jobs. Tasks that wait are ended with all of their array.

        scancel refuses what squeue says of them, such as 7_[0-4%2].
        """
        arrays = {job.partition("_[")[0]: None for job in ids if "_[" in job}
        super().delete([*arrays, *(job for job in ids if job.partition("_")[0] not in arrays)])

    def joules(self, ids: Sequence[str]) -> float:
        """The energy of these jobs by sacct(1), with all starts of a job that was requeued."""
        words = ("-X", "-D", "-n", "-P", "-j", ",".join(ids), "-o", "ConsumedEnergyRaw")
        told = programs.output("sacct", *words, timeout=SINFO_SECONDS, needs_success=True)
        return sum(float(line) for line in told.split() if line.isdecimal())

    def node_cores(self, queue: str, nodes: str = "") -> NodeCores | None:
        """The fewest cores of a partition's nodes, or of some of them.

        Args:
            queue: the partition; "" is the default one.
            nodes: the nodes, as a list of SLURM's; "" stands for all.
        """
        words = ["sinfo", "-h", "-o", "%P %X %Y %Z %c", *([f"--nodes={nodes}"] if nodes else [])]
        told = programs.output(*words, timeout=SINFO_SECONDS, needs_success=True)
        fewest = math.inf
        found = None
        for name, *numbers in filter(None, map(str.split, told.splitlines())):
            counts = [int(n.rstrip("+")) for n in numbers if re.fullmatch(r"\d+\+?", n)]
            chosen = name.rstrip("*") == queue if queue else name.endswith("*")
            if not chosen or len(counts) != 4:
                continue
            sockets, cores, threads, cpus = counts
            if sockets * cores < fewest:
                fewest = sockets * cores
                # A site may have told SLURM to count cores though they have several threads.
                found = NodeCores(fewest, threads, max(1, cpus // fewest))
        return found


def _expression(option: str, value: str) -> str:
    return expression(option, value) if value else ""
