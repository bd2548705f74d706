"""IBM Spectrum LSF. Sources: the manual's pages on bsub, bjobs and bkill of LSF 10.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hpc_train.errors import HpcTrainError, UserError
from hpc_train.launch import SchedulerName
from hpc_train.launch.schedulers.base import (
    LEAVE,
    QueuedJob,
    Scheduler,
    ask,
    expression,
    given,
    output_folder,
    said,
    silent,
    submitted,
    word,
)

if TYPE_CHECKING:
    from hpc_train.launch.batch import BatchJob

_STATES = {
    "PEND": "PENDING",
    "PROV": "PENDING",
    "WAIT": "PENDING",
    "PSUSP": "HELD",
    "RUN": "RUNNING",
    "USUSP": "SUSPENDED",
    "SSUSP": "SUSPENDED",
    "UNKWN": "UNKNOWN",
}
_OVER = ("DONE", "EXIT", "ZOMBI")
NOTICE = 5  # minutes before the run limit, at which SIGUSR1 comes
_FIELDS = "jobid jobindex stat pend_reason run_time exec_host delimiter='^'"


class Lsf(Scheduler):
    """LSF, whose slots are cores. `bsub` reads the script from its standard input."""

    name: SchedulerName = "lsf"
    slots_are_cores = True
    template = "lsf.sh"
    sign = "#BSUB"
    commands = ("bsub", "bjobs")
    # The run limit is reached: USR2. bkill: INT, TERM and KILL.
    early = ("USR1", "USR2")
    late = ("INT", "TERM")
    submits = ("bsub",)
    id_line = "(.*Job <)([0-9]+)> is submitted to .*queue.*"
    deletes = ("bkill",)
    arrays = "LSB_JOBINDEX"
    first_task = 1
    refused: ClassVar[Mapping[str, str]] = {
        "chain": LEAVE,
        "qos": LEAVE,
        "constraint": "give --directive '-R select[...]'",
        "resources": "give --directive '-R ...'",
        "memory": "give --directive '-M ...': each site counts it in its own unit",
    }

    def directives(self, batch: BatchJob) -> list[str]:
        """The directives of bsub.

        Raises:
            UserError: LSF would put numbers into the name of the run directory.
        """
        asked = batch.resources
        if "%" in output_folder(batch):
            raise UserError(
                f"run.dir {batch.run_dir!r} cannot be used: LSF puts numbers in place of %",
                "leave out %",
            )
        minutes = -(-asked.seconds // 60)
        array = f"[1-{len(batch.sweep)}]{batch.limit}" if batch.sweep else ""
        number = "%J-%I" if batch.sweep else "%J"
        lines = [
            f"-J {word('the name', batch.name)}{array}",
            f"-n {asked.ranks * asked.threads}",
            f"-R span[ptile={asked.ranks_per_node * asked.threads}]",
            f"-W {minutes // 60}:{minutes % 60:02}",
            f"-o {output_folder(batch)}{batch.name}-{number}.out",
            "-r",
        ]
        if self.notice(batch):
            lines += ["-wa USR1", f"-wt {NOTICE}"]
        if asked.gpus:
            lines.append(f"-gpu num={asked.gpus}/host")
        lines += given(
            {
                "-P ": asked.account and word("--account", asked.account),
                "-q ": asked.queue and word("--queue", asked.queue),
                "-U ": asked.reservation and word("--reservation", asked.reservation),
                "-u ": asked.mail and expression("--mail", asked.mail),
            }
        )
        return [*lines, *["-N"] * bool(asked.mail), *["-x"] * asked.exclusive]

    def line(self, directive: str) -> str:
        """A directive as a line of the script; bsub reads such a line as a shell does."""
        line = super().line(directive)
        if '"' in directive:  # the user's own
            return line
        # The words behind an option are one value, as in -R select[mem>1] rusage[mem=1].
        return re.sub(r"(?<= )[^\s-]\S*(?: [^\s-]\S*)*", _quoted, line)

    def notice(self, batch: BatchJob) -> int:
        """NOTICE minutes, in jobs that are long enough for it."""
        return 60 * NOTICE if batch.resources.seconds > 120 * NOTICE else 0

    def settings(self, batch: BatchJob) -> list[str]:
        """The line that sets the run limit, which LSF tells in minutes only."""
        return [
            "# Seconds, as in the directive -W.",
            *super().settings(batch),
        ]

    def queue(self, batch: BatchJob, after: str = "") -> list[str]:
        """Queue the script of a job; returns its id."""
        return [self.id_of(submitted(self.submits, Path(batch.script)))]

    def queued(self, ids: Sequence[str]) -> list[QueuedJob]:
        """The jobs of these that wait in the queue or run."""
        done = ask(["bjobs", "-noheader", "-o", _FIELDS, *ids])
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if any("is not found" not in line for line in lines) or (done.returncode and not lines):
            raise silent(done)
        found = []
        for line in done.stdout.splitlines():
            job, index, state, why, elapsed, hosts = (*line.split("^"), *[""] * 6)[:6]
            if state and state not in _OVER:
                name = job if index in ("", "-", "0") else f"{job}[{index}]"
                plain = ["" if value == "-" else value for value in (why, elapsed, hosts)]
                found.append(QueuedJob(name, _STATES.get(state, state), *plain))
        return found

    def delete(self, ids: Sequence[str]) -> None:
        """End jobs. LSF calls it an error if one of them has ended already."""
        done = ask([*self.deletes, *ids])
        if done.returncode and "already finished" not in said(done):
            raise HpcTrainError(f"bkill {' '.join(ids)}: {said(done)}", "try again")


def _quoted(value: re.Match[str]) -> str:
    return f'"{value[0]}"' if {*"[(="} & {*value[0]} else value[0]
