"""PBS Pro, OpenPBS and Torque. Sources: the manuals of qsub, qstat, qdel of OpenPBS 23, Torque."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from hpc_train.config.durations import format_duration
from hpc_train.errors import UserError
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
    word,
)

if TYPE_CHECKING:
    from hpc_train.launch.batch import BatchJob

_STATES = {
    "B": "RUNNING",  # an array of which a task has started
    "E": "EXITING",
    "H": "HELD",
    "Q": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "T": "MOVING",
    "W": "WAITING",
}
_OVER = ("C", "F", "X")


class Pbs(Scheduler):
    """PBS Pro and OpenPBS. PBS sends no signal before the walltime."""

    name: SchedulerName = "pbs"
    template = "pbs.sh"
    sign = "#PBS"
    commands = ("qsub", "qstat", "qdel")
    submits = ("qsub",)
    id_line = "()([0-9]+(\\[\\])?([.][^ ]+)?)"
    deletes = ("qdel",)
    arrays = "PBS_ARRAY_INDEX"
    refused: ClassVar[Mapping[str, str]] = {
        "chain": LEAVE,
        "qos": LEAVE,
        "constraint": "give --resources",
        "reservation": "give the reservation's queue by --queue",
    }

    def directives(self, batch: BatchJob) -> list[str]:
        """The directives of qsub."""
        asked = batch.resources
        lines = [
            f"-N {word('the name', batch.name)}",
            f"-l {asked.text or self._select(batch)}",
            f"-l walltime={format_duration(asked.seconds)}",
            *given({"-o ": output_folder(batch)}),
            "-j oe",
            *self._output_options(),
            "-r y",
        ]
        if asked.account:
            lines.append(f"{asked.account_option} {word('--account', asked.account)}")
        if asked.queue:
            lines.append(f"-q {word('--queue', asked.queue)}")
        if batch.sweep:
            lines.append(f"{self._array_option()} 0-{len(batch.sweep) - 1}{batch.limit}")
        lines += self._memory(batch)
        lines += self._place(batch)
        if asked.mail:
            lines += ["-m ae", f"-M {expression('--mail', asked.mail)}"]
        return lines

    def settings(self, batch: BatchJob) -> list[str]:
        """The line that sets the walltime, which PBS does not tell."""
        return [
            "# Seconds, as in the directive. PBS sends no early signal.",
            *super().settings(batch),
        ]

    def queued(self, ids: Sequence[str]) -> list[QueuedJob]:
        """The jobs of these that wait in the queue or run."""
        done = ask(["qstat", "-f", *ids])
        over = ("Unknown Job", "has finished")
        told = [line for line in done.stderr.splitlines() if not any(word in line for word in over)]
        if done.returncode and (told or not done.stderr):  # it may warn beside its answer
            raise silent(done)
        found = []
        # A long value goes on in lines that begin with a tab.
        for text in re.split("^Job Id:", done.stdout.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
            pairs: list[tuple[str, str]] = re.findall(r"^\s+([\w.]+) = (.*)$", text, re.MULTILINE)
            values = dict(pairs)
            state = values.get("job_state", "")
            if state not in _OVER:
                found.append(
                    QueuedJob(
                        text.split()[0],
                        _STATES.get(state, state),
                        values.get("comment", "") if state == "Q" else "",
                        values.get("resources_used.walltime", ""),
                        values.get("exec_host", ""),
                    )
                )
        return found

    def _select(self, batch: BatchJob) -> str:
        asked = batch.resources
        cores, ranks = asked.ranks_per_node * asked.threads, asked.ranks_per_node
        usual = f"select={asked.nodes}:ncpus={cores}:mpiprocs={ranks}:ompthreads={asked.threads}"
        gpus = f":ngpus={asked.gpus}" if asked.gpus else ""
        return usual + gpus + (f":mem={asked.memory_gb}gb" if asked.memory_gb else "")

    def _place(self, batch: BatchJob) -> list[str]:
        """Each chunk on a node of its own: by itself PBS puts several on a node that has room."""
        asked = batch.resources
        if asked.exclusive:
            return ["-l place=scatter:excl"]
        placed = asked.text or any(line.startswith("-l place=") for line in asked.directives)
        return [] if placed or asked.nodes == 1 else ["-l place=scatter"]

    def _output_options(self) -> list[str]:
        return ["-k doe"]  # write where it belongs from the start, so that it can be followed

    def _array_option(self) -> str:
        return "-J"

    def _memory(self, batch: BatchJob) -> list[str]:
        return []


class Torque(Pbs):
    """Torque, whose slots are cores."""

    name: SchedulerName = "torque"
    slots_are_cores = True
    arrays = "PBS_ARRAYID"
    refused: ClassVar[Mapping[str, str]] = {
        **Pbs.refused,
        "exclusive": "give --directive as your site describes it",
    }

    def directives(self, batch: BatchJob) -> list[str]:
        """The directives of Torque's qsub.

        Raises:
            UserError: Torque would refuse the job's name.
        """
        if not re.fullmatch(r"[A-Za-z]\S{0,14}", batch.name):
            raise UserError(
                f"Torque does not take the name {batch.name!r}",
                "give --name with up to 15 characters, of which the first is a letter",
            )
        return super().directives(batch)

    def _select(self, batch: BatchJob) -> str:
        asked = batch.resources
        gpus = f":gpus={asked.gpus}" if asked.gpus else ""
        return f"nodes={asked.nodes}:ppn={asked.ranks_per_node * asked.threads}{gpus}"

    def _place(self, batch: BatchJob) -> list[str]:
        return []  # Torque has no such option

    def _output_options(self) -> list[str]:
        return []  # Torque does not know the option

    def _array_option(self) -> str:
        return "-t"

    def _memory(self, batch: BatchJob) -> list[str]:
        asked = batch.resources  # memory of the whole job
        return [f"-l mem={asked.nodes * asked.memory_gb}gb"] if asked.memory_gb else []
