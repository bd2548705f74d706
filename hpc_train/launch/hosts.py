"""The hosts of a job and their slots, from the command line, a host file, or the scheduler.

Every source gives the same list: hosts in their order, each with the number of ranks it takes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hpc_train.errors import UserError, plural
from hpc_train.host.programs import output

FLUX_SECONDS = 30.0  # seconds to wait for Flux's answer
UNSET_SLURM = "unset SLURM_JOB_NODELIST and give the hosts by -H"  # or it is read again


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Allocation:
    """The hosts that a scheduler has given to this job.

    Args:
        scheduler: slurm, pbs, lsf, flux or mpijob.
        hosts: in the scheduler's order. Flux does not say how many ranks a host takes: one. There
            are none if the scheduler does not tell them: see `known_hosts`.
    """

    scheduler: str
    hosts: list[Host]

    def known_hosts(self) -> list[Host]:
        """The hosts, where the user has named none.

        Raises:
            UserError: the scheduler does not tell them.
        """
        if not self.hosts:
            raise UserError(
                "salloc has made a heterogeneous job, and does not tell its hosts",
                "give the hosts by -H to `hpc-train launch`, or ask for a job of one component",
            )
        return self.hosts


def parse_hosts(text: str) -> list[Host]:
    """Hosts as -H has them: "node1:4,node2:4"; a host without a number takes one rank.

    Raises:
        UserError: it is not such a list, or names a host twice.
    """
    found = []
    for entry in text.split(","):
        parts = re.fullmatch(r"\s*([\w.-]+)(?::(\d+))?\s*", entry)
        if not parts or parts[2] == "0":
            raise UserError(f"-H has {entry!r}", "write hosts as node1:4,node2:4")
        found.append(Host(parts[1], int(parts[2] or 1)))
    names = [host.name for host in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"-H names {min(twice)} twice", "write each host once, with all its slots")
    return found


def read_file(path: Path) -> list[Host]:
    """Read a host file as Open MPI, MPICH, Horovod or PBS write it.

    Lines are `node1 slots=4`, `node1:4`, or `node1`, once for each slot; # begins a comment.

    Raises:
        UserError: the file cannot be read, names no host, or has a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"host file {path}: {error}", "give a file with one host per line"
        ) from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        parts = re.fullmatch(r"([\w.-]+)(?::(\d+)|\s+(?:.*\s)?slots\s*=\s*(\d+).*)?", text)
        if not parts:
            raise UserError(
                f"host file {path}, line {number}: {text!r}", "write node1 slots=4, or node1:4"
            )
        slots[parts[1]] = slots.get(parts[1], 0) + int(parts[2] or parts[3] or 1)
    if not any(slots.values()):
        raise UserError(f"host file {path} names no host", "write one per line: node1 slots=4")
    return [Host(name, count) for name, count in slots.items() if count]


def allocated(environ: Mapping[str, str]) -> Allocation | None:
    """The hosts that this process's batch job has been given; None outside of a batch job.

    Raises:
        UserError: the scheduler's variables or files are not what its manual says.
    """
    if "SLURM_JOB_NODELIST" in environ or "SLURM_HET_SIZE" in environ:
        return Allocation("slurm", _slurm(environ))
    if "PBS_NODEFILE" in environ:
        return Allocation("pbs", read_file(Path(environ["PBS_NODEFILE"])))
    for variable in ("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE"):
        if variable in environ:
            found = read_file(Path(environ[variable]))
            return Allocation("lsf", _without_launch_host(found, environ))
    if words := environ.get("LSB_MCPU_HOSTS", "").split():
        if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
            raise UserError(
                f"LSB_MCPU_HOSTS is {' '.join(words)!r}", "unset it and give the hosts by -H"
            )
        slots: dict[str, int] = {}
        for name, count in zip(words[::2], map(int, words[1::2]), strict=True):
            slots[name] = slots.get(name, 0) + count
        found = [Host(name, count) for name, count in slots.items()]
        return Allocation("lsf", _without_launch_host(found, environ))
    if "FLUX_ENCLOSING_ID" in environ and "FLUX_TASK_RANK" not in environ:
        names = output("flux", "hostlist", "-le", "instance", timeout=FLUX_SECONDS).split()
        return Allocation("flux", [Host(name, 1) for name in dict.fromkeys(names)])
    if environ.get("K_MPI_JOB_ROLE") == "launcher":
        # mpi-operator v2beta1 puts the workers into this file.
        return Allocation("mpijob", read_file(Path("/etc/mpi/hostfile")))
    return None


def slurm_cpus(environ: Mapping[str, str]) -> int:
    """CPUs that a SLURM job has on the node where it has the fewest; 0 outside of such a job."""
    return min(_repeated(environ.get("SLURM_JOB_CPUS_PER_NODE", "")), default=0)


def _slurm(environ: Mapping[str, str]) -> list[Host]:
    if "SLURM_JOB_NODELIST" not in environ:  # a heterogeneous job of salloc
        return []
    names = expand(environ["SLURM_JOB_NODELIST"])
    counts = _repeated(environ.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})"))
    if len(counts) != len(names):
        raise UserError(
            f"SLURM_TASKS_PER_NODE has {len(counts)} nodes, SLURM_JOB_NODELIST {len(names)}",
            UNSET_SLURM,
        )
    return [Host(name, count) for name, count in zip(names, counts, strict=True)]


def _repeated(text: str) -> list[int]:
    """SLURM's list of numbers: 2(x3),1 is 2, 2, 2, 1."""
    found: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(number)] * int(times or 1)
    return found


def _without_launch_host(hosts: list[Host], environ: Mapping[str, str]) -> list[Host]:
    """Leave out the host of the script: where jsrun is, LSF lists it first, without a rank."""
    many = len(hosts) > 1 and max(host.slots for host in hosts[1:]) > 1
    is_launch_host = hosts[0].slots == 1 and many
    found = is_launch_host and shutil.which("jsrun", path=environ.get("PATH"))
    return hosts[1:] if found else hosts


def expand(text: str) -> list[str]:
    """The names of a SLURM host list: "n[1-3,07],gpu[1-2]-ib" has six.

    Raises:
        UserError: its brackets do not match, or a range runs backwards.
    """
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names += _expanded(entry)
    if text.count("[") != text.count("]") or not names:
        raise UserError(f"the host list {text!r} cannot be read", UNSET_SLURM)
    return names


def compress(names: Iterable[str]) -> str:
    """A SLURM host list of different names, in their order: n1, n2 and n3 are n[1-3]."""
    runs: list[tuple[str, str, str, str]] = []  # before the number, first and last number, after it
    for name in names:
        parts = re.fullmatch(r"([^.]*?)([0-9]+)([^0-9.]*(?:\..*)?)", name)
        before, number, after = parts.groups() if parts else (name, "", "")
        if number and runs and _follows(runs[-1], before, number, after):
            runs[-1] = (before, runs[-1][1], number, after)
        else:
            runs.append((before, number, number, after))
    groups = []
    for (before, after), alike in groupby(runs, key=lambda run: (run[0], run[3])):
        numbers = [first if first == last else f"{first}-{last}" for _, first, last, _ in alike]
        inside = ",".join(numbers)
        alone = numbers == [inside] and "-" not in inside
        groups.append(f"{before}{inside if alone else f'[{inside}]'}{after}")
    return ",".join(groups)


def _follows(run: tuple[str, str, str, str], before: str, number: str, after: str) -> bool:
    """Whether a name's number is the next one of a run, written with as many digits."""
    alike = len(number) == len(run[1]) or "0" not in (run[1][:1], number[:1])
    return (run[0], run[3]) == (before, after) and int(number) == int(run[2]) + 1 and alike


def _expanded(entry: str) -> Iterable[str]:
    before, bracket, rest = entry.partition("[")
    if not bracket:
        return [entry]
    inside, _, after = rest.partition("]")
    return [
        f"{before}{number}{end}" for number in _numbers(inside) for end in _expanded(after)
    ] or [entry]


def _numbers(inside: str) -> Iterable[str]:
    """The numbers of a list like 1-3,07, each with as many digits as the first of its range."""
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last))):
            raise UserError(f"the host list has [{inside}]", UNSET_SLURM)
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def take_hosts(hosts: Iterable[Host], ranks: int) -> list[Host]:
    """The first hosts that hold `ranks` ranks; the last one has only the slots that are needed.

    Raises:
        UserError: the hosts have fewer slots.
    """
    used: list[Host] = []
    left = ranks
    for host in hosts:
        if left > 0:
            used.append(Host(host.name, min(host.slots, left)))
            left -= host.slots
    if left > 0:
        total = ranks - left
        raise UserError(
            f"-np {ranks} is more than the {plural(total, 'slot')} of {plural(len(used), 'host')}",
            f"give -np {total}, or more hosts or slots",
        )
    return used
