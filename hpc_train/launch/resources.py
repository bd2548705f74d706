"""What a job asks of the scheduler besides nodes and time: cores, GPUs, memory, mail and the like.

Sources: sbatch(1) and sinfo(1) of Slurm 22.05, qsub(1B) of OpenPBS 23, Torque's manual.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hpc_train.errors import UserError
from hpc_train.host import programs
from hpc_train.launch import Scheduler
from hpc_train.launch.request import SubmitRequest
from hpc_train.launch.sites import NUMBERS, Site, filled

SINFO_SECONDS = 10.0  # seconds to wait for the scheduler's answer


@dataclass(frozen=True)
class JobSize:
    """The size of a job.

    Args:
        nodes: number of nodes.
        ranks_per_node: ranks on each node.
        threads: cores of each rank.
        gpus: GPUs of each node; 0 asks for none.
        memory_gb: memory of each node; 0 leaves it to the scheduler.
    """

    nodes: int
    ranks_per_node: int
    threads: int
    gpus: int = 0
    memory_gb: int = 0

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that a site's lines may contain, as {nodes} and the like."""
        ranks = self.nodes * self.ranks_per_node
        values = (self.nodes, ranks, self.ranks_per_node, self.threads, ranks * self.threads)
        return dict(
            zip(
                NUMBERS, (*values, self.nodes * self.gpus, self.nodes * self.memory_gb), strict=True
            )
        )


@dataclass(frozen=True)
class NodeCores:
    """The cores of a node.

    Args:
        cores: physical cores, of the smallest node of a partition.
        hardware_threads: hardware threads of each core.
    """

    cores: int
    hardware_threads: int


def slurm_node(partition: str) -> NodeCores | None:
    """Ask SLURM for the cores of a partition's nodes.

    Args:
        partition: its name; "" is the default partition.

    Returns:
        The fewest cores of its nodes; None if SLURM does not answer.
    """
    told = programs.output(
        "sinfo", "-h", "-o", "%P %X %Y %Z", timeout=SINFO_SECONDS, needs_success=True
    )
    fewest = math.inf
    found = None
    for line in told.splitlines():
        name, *numbers = line.split()
        counts = [int(number.rstrip("+")) for number in numbers if re.fullmatch(r"\d+\+?", number)]
        chosen = name.rstrip("*") == partition if partition else name.endswith("*")
        if chosen and len(counts) == 3 and counts[0] * counts[1] < fewest:
            fewest = counts[0] * counts[1]
            found = NodeCores(counts[0] * counts[1], counts[2])
    return found


def directives(
    request: SubmitRequest, site: Site, size: JobSize, scheduler: Scheduler
) -> list[str]:
    """Directives for GPUs, memory, QOS, constraint, reservation, exclusive nodes and mail.

    Raises:
        UserError: a value cannot be a word of a directive.
    """
    if scheduler == "slurm":
        values = {
            site.gpu_option: size.gpus or "",
            "--mem=": f"{size.memory_gb}G" if size.memory_gb else "",
            "--qos=": "" if site.queue_option == "--qos" else request.qos,
            "--constraint=": request.constraint or site.constraint,
            "--reservation=": request.reservation,
            "--mail-user=": request.mail,
            "--mail-type=": "END,FAIL" if request.mail else "",
        }
        lines = [f"{option}{_word(option, value)}" for option, value in values.items() if value]
        return [*lines, *["--exclusive"] * (request.exclusive or site.exclusive)]
    # Torque counts memory for the whole job, PBS for each node: see `of_each_node`.
    counted = scheduler == "torque" and size.memory_gb
    lines = [f"-l mem={size.nodes * size.memory_gb}gb"] if counted else []
    if request.exclusive:
        lines.append("-l place=scatter:excl")
    if request.mail:
        lines += ["-m ae", f"-M {_word('--mail', request.mail)}"]
    return lines


def of_each_node(scheduler: Scheduler, size: JobSize) -> str:
    """GPUs and memory for the usual line of PBS, which lists what each node has to have."""
    gpus = {"pbs": "ngpus", "torque": "gpus"}.get(scheduler, "")
    words = f":{gpus}={size.gpus}" if gpus and size.gpus else ""
    return words + (f":mem={size.memory_gb}gb" if scheduler == "pbs" and size.memory_gb else "")


def pbs_resources(request: SubmitRequest, site: Site, size: JobSize) -> str:
    """The resources that the user or the site gives for PBS, in place of the usual ones; or "".

    Raises:
        UserError: they contain an unknown number, or have no place for a number that was given.
    """
    given = request.resources or site.resources
    if not given:
        return ""
    for option, number in (("gpus", "{gpus}"), ("memory", "{memory_gb}")):
        if getattr(request, option) and number not in given:
            raise UserError(
                f"--{option} is given, but the resources are {given!r}",
                f"give --resources with {number} in it, or leave out --{option}",
            )
    try:
        return filled([given], size.numbers)[0]
    except (KeyError, IndexError, ValueError):
        known = ", ".join(f"{{{number}}}" for number in NUMBERS)
        raise UserError(f"--resources is {given!r}", f"it may contain {known}") from None


def _word(option: str, value: object) -> str:
    """Return a value that is a single word. `batch.text` checks the characters of directives."""
    if len(str(value).split()) != 1:
        raise UserError(f"{option.rstrip('=')} is {str(value)!r}", "give one word, without spaces")
    return str(value)
