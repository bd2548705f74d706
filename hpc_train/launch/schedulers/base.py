"""What all schedulers share: the words that a job asks with, and questions about queued jobs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hpc_train.errors import HpcTrainError, UserError
from hpc_train.launch import SchedulerName
from hpc_train.launch.protocol import QUEUED
from hpc_train.mpi.environment import without_launcher
from hpc_train.warm.key import WARM

if TYPE_CHECKING:
    from hpc_train.launch.batch import BatchJob
    from hpc_train.launch.resources import Resources

ANSWER_SECONDS = 30.0  # seconds to wait for the scheduler's answer
# SLURM: all tasks of an array, and not only those that 64 characters can name.
ANSWERS = {"LC_ALL": "C", "FLUX_F58_FORCE_ASCII": "1", "SLURM_BITSTR_LEN": "0"}
LEAVE = "leave it out"
# The user and our module set these. All other variables of ours are about the job around us.
SETTINGS = (WARM, "HPC_TRAIN_PREFIX", "HPC_TRAIN_ROOT", "HPC_TRAIN_SILENCE")
SHORT = 600  # seconds; in shorter jobs the signal could come at the start (SLURM's: 60 s early)


@dataclass(frozen=True)
class QueuedJob:
    """A job that waits in the queue or runs.

    Args:
        id: the scheduler's id.
        state: such as PENDING or RUNNING.
        why: why it waits, as the scheduler says it.
        elapsed: how long it has run; "" if that is not known.
        hosts: where it runs.
    """

    id: str
    state: str
    why: str = ""
    elapsed: str = ""
    hosts: str = ""


@dataclass(frozen=True)
class NodeCores:
    """The cores of a node.

    Args:
        cores: physical cores, of the smallest node of a partition.
        hardware_threads: hardware threads of each core.
        cpus_of_core: what the scheduler counts for each core: its hardware threads, or 1.
    """

    cores: int
    hardware_threads: int
    cpus_of_core: int


class Scheduler:
    """How a scheduler is asked for a job, and later about it. There is a subclass for each.

    Attributes:
        name: as --scheduler has it.
        template: the script's template in jobscripts/templates.
        sign: begins a directive.
        commands: the scheduler's commands that the script calls.
        early, late: signals that reach the script. After an early one the job is queued again. A
            late one may mean that somebody has cancelled the job.
        submits, deletes: the words that queue a script, and that end jobs.
        id_line: the line in the answer to `submits` that has the job's id, as a regular expression
            of both Python and `sed -E`. The id is its second group. Sites print other lines, too.
        requeues: whether it can queue the same job again.
        ids_come_back: whether a job that has ended may run again under the same id.
        arrays: the variable that has a task's number; "" if there are no arrays. Then each task is
            a job of its own, with the number in HPC_TRAIN_TASK.
        first_task: number of the first task.
        warns: whether SIGUSR1 comes a tenth of the time before the limit, or 5 minutes if less.
        slots_are_cores: whether a host's slots are its cores, and not the ranks.
        tells_hosts: whether a job can find out its hosts; else it has this machine alone.
        gpu_option: the option by which it is given the number of GPUs, unless a site has another.
        refused: options of `submit` that it cannot use, with what to do instead. They are refused,
            because ignoring them would mislead.
    """

    name: SchedulerName
    template: ClassVar[str]
    sign: ClassVar[str] = ""
    commands: ClassVar[Sequence[str]] = ()
    early: ClassVar[Sequence[str]] = ("USR1",)
    late: ClassVar[Sequence[str]] = ("TERM",)
    submits: ClassVar[Sequence[str]]
    id_line: ClassVar[str] = ""
    deletes: ClassVar[Sequence[str]] = ()
    requeues: ClassVar[bool] = False
    ids_come_back: ClassVar[bool] = True
    arrays: ClassVar[str] = ""
    first_task: ClassVar[int] = 0
    warns: ClassVar[bool] = False
    slots_are_cores: ClassVar[bool] = False
    tells_hosts: ClassVar[bool] = True
    gpu_option: ClassVar[str] = ""
    refused: ClassVar[Mapping[str, str]] = {}

    def directives(self, batch: BatchJob) -> list[str]:
        """What the job asks for, without the sign.

        Raises:
            UserError: a value has characters that a directive cannot have.
        """
        raise NotImplementedError

    def notice(self, batch: BatchJob) -> int:
        """Seconds before the time limit at which SIGUSR1 comes; 0 if it does not come."""
        seconds = batch.resources.seconds
        return min(300, seconds // 10) if self.warns and seconds >= SHORT else 0

    def settings(self, batch: BatchJob) -> list[str]:
        """Lines of shell that set what this scheduler's template has besides the others."""
        return [f"walltime={batch.resources.seconds}"]

    def line(self, directive: str) -> str:
        """A directive as a line of the script."""
        return f"{self.sign} {directive}"

    def launch_words(self, asked: Resources, environ: Mapping[str, str]) -> list[str]:
        """What `hpc-train launch` has to be told of the ranks, because the scheduler does not.

        Args:
            asked: what the job asks for.
            environ: the variables that the job sets.
        """
        if self.slots_are_cores and asked.threads > 1:
            return ["--ranks_per_node", str(asked.ranks_per_node)]
        return [] if self.tells_hosts else ["-np", str(asked.ranks)]

    def text(self, batch: BatchJob) -> str:
        """The script of a job.

        Raises:
            UserError: a value has characters that a directive cannot have.
        """
        from hpc_train.launch import templates  # here, because questions need no template library

        own = [self.line(directive) for directive in self.directives(batch)]
        further = [self.line(self._option(text)) for text in batch.resources.directives]
        return templates.script(self, [*own, *further], batch)

    def _option(self, directive: str) -> str:
        if directive[:1] in ("", "-"):
            return checked(directive)
        raise UserError(
            f"{directive!r} cannot be a directive of a batch script",
            f"give an option that begins with -, such as -q long, without {self.sign}",
        )

    def queue(self, batch: BatchJob, after: str = "") -> list[str]:
        """Queue the script of a job; returns the ids of the queued jobs.

        Args:
            batch: the job. Its script is written.
            after: the id of a job. The queued one starts if that one ends without finishing.

        Raises:
            HpcTrainError: the scheduler refuses it.
        """
        words = [*self.submits, *(self.chained(after) if after else ()), batch.script]
        return [self.id_of(submitted(words))]

    def chained(self, after: str) -> list[str]:
        """The words for a job that waits for another one."""
        raise NotImplementedError

    def id_of(self, answer: str) -> str:
        """The id of the job that was queued, from what the scheduler has answered.

        Raises:
            HpcTrainError: the answer has none.
        """
        lines = [re.fullmatch(self.id_line, line) for line in answer.splitlines()]
        found = [line[2] for line in lines if line]
        if not found:
            raise HpcTrainError(
                f"{shlex.join(self.submits)} says no job id, but {' '.join(answer.split())!r}",
                "look in the queue whether the job is there, and end it before you submit again",
            )
        return found[-1]

    def queued(self, ids: Sequence[str]) -> list[QueuedJob]:
        """The jobs of these that wait in the queue or run.

        Raises:
            HpcTrainError: the scheduler does not say.
        """
        raise NotImplementedError

    def joules(self, ids: Sequence[str]) -> float:
        """The energy of these jobs as the scheduler accounts for it; 0 if it does not."""
        return 0.0

    def delete(self, ids: Sequence[str]) -> None:
        """Remove jobs from the queue, and end those that run.

        Raises:
            HpcTrainError: the scheduler does not do it.
        """
        words = [*self.deletes, *ids]
        done = ask(words)
        if done.returncode:
            raise HpcTrainError(f"{shlex.join(words)}: {said(done)}", "try again")

    def node_cores(self, queue: str, nodes: str = "") -> NodeCores | None:
        """The fewest cores of a queue's nodes; None if the scheduler does not say."""
        return None


def checked(line: str) -> str:
    """Return a directive whose characters mean nothing to a shell or a scheduler; refuse others.

    % stands for numbers in names of output files, @ for a time, [ ] in arrays and node lists.
    Double quotes keep words together, as in --comment="two words".
    """
    plain = re.fullmatch(r"[\w .,:;=@%+/~^&|*\[\]()<>!?\"-]+", line, re.ASCII)
    if not plain or line.count('"') % 2:
        raise UserError(
            f"{line!r} cannot be a directive of a batch script",
            "use letters, digits, . , : = @ % + / - _ and pairs of double quotes only",
        )
    return line


def word(what: str, value: str) -> str:
    """Return a value of a directive if it is a single word; refuse others."""
    if not re.fullmatch(r"[\w.,:=@%+/~^|*\[\]-]+", value, re.ASCII):
        raise UserError(
            f"{what} {value!r} cannot be used in a batch script",
            "use letters, digits and . , : = @ % + / - _ only, without spaces",
        )
    return value


def output_folder(batch: BatchJob) -> str:
    """The folder of the job's output, with a slash behind it, if a directive can have it."""
    return batch.outputs and f"{word('run.dir', batch.run_dir)}/"


def expression(what: str, value: str) -> str:
    """Return a value that is a single word, and may have & and brackets, such as a100&nvme."""
    if len(value.split()) != 1:
        raise UserError(f"{what} is {value!r}", "give one word, without spaces")
    return checked(value)


def given(words: Mapping[str, str]) -> list[str]:
    """The directives of those options that have a value: {"-q ": "long", "-P ": ""} is -q long."""
    return [f"{option}{value}" for option, value in words.items() if value]


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a new job, without what the job around this process has been told."""
    free = without_launcher(environ)
    if free.get(WARM, "").startswith("launch-"):
        del free[WARM]
    return {
        name: value
        for name, value in free.items()
        if name.startswith(SETTINGS)
        or not (name.startswith("HPC_TRAIN_") or name == "SLURM_RESTART_COUNT")
    }


def submitted(
    words: Sequence[str], stdin: Path | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """Run the command that queues a job; returns its answer.

    Args:
        words: the command.
        stdin: a file that it reads.
        environ: further variables for it.

    Raises:
        HpcTrainError: it fails.
    """
    done = subprocess.run(
        words,
        input=stdin.read_text(encoding="utf-8") if stdin else None,
        stdin=None if stdin else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**outside(os.environ), **(environ or {})},
    )
    if done.returncode:
        raise HpcTrainError(
            f"{shlex.join(words)}: {said(done)}",
            "change the option that it refuses, or try again later if it did not answer",
        )
    return done.stdout


def ask(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that asks the scheduler. It counts as failed if it is not here or is silent."""
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
            env=dict(os.environ) | ANSWERS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"no answer within {ANSWER_SECONDS:.0f} s"
        if isinstance(error, OSError):
            why = error.strerror or type(error).__name__
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]}: {why}")


def silent(done: subprocess.CompletedProcess[str]) -> HpcTrainError:
    """The error that a scheduler does not say which jobs there are."""
    return HpcTrainError(
        f"the scheduler does not say whether a job of this run is queued: {said(done)}",
        f"try again, or remove {QUEUED} of the run directory if no job is left",
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What a command has printed, in one line."""
    return " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
