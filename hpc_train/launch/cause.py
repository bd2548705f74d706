"""Find out why a job failed, from its exit code and the output of its launcher and its ranks.

It knows the lines of Open MPI 4 and 5, MPICH's Hydra, PALS and Slurm's srun (from their sources),
this package's own errors, and Python's tracebacks.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

OUT_OF_MEMORY = "out of memory"
PERHAPS_MEMORY = ", perhaps for lack of memory"
SERVER_KILLED = ": the fork server of its node was killed"
# Each pattern finds some of rank, host, signal and exit code. An earlier line counts more: after a
# failure the launcher kills the other ranks, which did not cause it.
PATTERNS = [
    re.compile(text)
    for text in (
        # Open MPI 4, 5
        r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on "
        r"signal (?P<signal>\d+)",
        r"PRTE? .*rank (?P<rank>\d+).* on node (?P<host>\S+).*signal (?P<signal>\d+)",
        # srun
        r"srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)[\d,-]*: (?P<memory>Out Of Memory)",
        r"srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)[\d,-]*: (?P<killed>Killed)",
        r"srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)[\d,-]*: (?P<fault>Segmentation fault|"
        r"Aborted|Bus error|Floating point exception|Illegal instruction)",
        r"srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)[\d,-]*: Exited with exit code "
        r"(?P<code>\d+)",
        r"(?:slurmstepd|srun): error: .*(?P<memory>oom_kill|oom-kill|OOM Killed)",
        r"srun: error: Node failure on (?P<lost>\S+)",
        # PALS
        r"(?P<host>\S+): rank (?P<rank>\d+) died from signal (?P<signal>\d+)",
        r"(?P<host>\S+): rank (?P<rank>\d+) exited with code (?P<code>\d+)",
        # Hydra
        r"RUNNING AT (?P<host>\S+)",
        r"EXIT STRING: \w+(?: \w+)* \(signal (?P<signal>\d+)\)",
        # Open MPI, about a host whose daemon it lost
        r"Node name:\s+(?P<lost>\S+)",
        r"(?P<away>lost communication with a remote daemon)",
        # Open MPI, about a rank that ended by itself
        r"Process name:\s+\[(?:\[\d+,\d+\]|[^\s\[\]]+@\d+),(?P<rank>\d+)\]",
        r"Exit code:\s+(?P<code>\d+)",
        # Open MPI, in two lines, about a rank that ended without MPI_Finalize
        r"exited due to process rank (?P<rank>\d+) with PID \d+ on",
        r"node (?P<host>\S+) (?P<improper>exiting improperly)",
        # the process that stands in for a warm rank
        r"(?P<server>fork server) was killed, and this rank with it",
    )
]
# What `hpc_train.run` prints about a rank that ends the others.
OWN_RANK = re.compile(
    r"(?P<rank>rank \d+ \([^()\s]+\)) "
    r"(?:(?P<left>left the program by .*?)(?:, but other ranks did not)?$|failed:$)"
)
TRACEBACK = "Traceback (most recent call last)"
OWN_ERROR = re.compile(r"hpc-train: error: (.*)")
CONTAINER_ERROR = re.compile(r"FATAL:   (.*)")  # Apptainer's and Singularity's, with three spaces
SIGNAL_WORDS = {"Killed": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7}
SIGNAL_WORDS |= {"Floating point exception": 8, "Illegal instruction": 4}


def explain(code: int, lines: Sequence[str]) -> str:
    """The cause in a few words, such as "rank 3 (node2) was killed by SIGKILL".

    Args:
        code: the launcher's exit code; negative for a signal.
        lines: the last lines that it and the ranks have printed.
    """
    for line in lines:
        if own := OWN_ERROR.search(line):
            return own[1].strip()
        if container := CONTAINER_ERROR.match(line):
            return f"the container does not start: {container[1].strip()}"
    found: dict[str, str] = {}
    for line in lines:
        for pattern in PATTERNS:
            if match := pattern.search(line):
                found = {**match.groupdict(), **found}
    found = {key: value for key, value in found.items() if value}
    told = _told(found)
    if not told or "exited" in told:
        told = _by_itself(told, lines)
    if told := told or _help(lines):
        return told
    return _end(code)


def _told(found: dict[str, str]) -> str:
    who = f"rank {found['rank']}" if "rank" in found else "a rank"
    host = f" ({found['host'].rstrip(':')})" if "host" in found else ""
    if "lost" in found:
        return f"host {found['lost']} was lost"
    if "memory" in found:
        return f"{who}{host} ran {OUT_OF_MEMORY}"
    number = int(found.get("signal", 0)) or SIGNAL_WORDS.get(
        found.get("killed", found.get("fault", "")), 0
    )
    if number:
        hint = PERHAPS_MEMORY if number == signal.SIGKILL else ""
        hint = SERVER_KILLED if "server" in found else hint
        return f"{who}{host} was ended by {_signal(number)}{hint}"
    if "server" in found:
        return f"{who}{host} has ended{SERVER_KILLED}"
    if "code" in found:
        return f"{who}{host} exited with code {found['code']}"
    if "improper" in found:
        return f"{who}{host} exited without MPI_Finalize"
    return "a host was lost" if "away" in found else ""


def _by_itself(told: str, lines: Sequence[str]) -> str:
    """Why a rank ended that no signal has ended, by what this package and Python say of it.

    Args:
        told: what the launcher says of it.
        lines: the output.
    """
    own = next((match for line in lines if (match := OWN_RANK.search(line))), None)
    if own and own["left"]:
        return f"{own['rank']} {own['left']}"
    who, raised = f"{own['rank']} failed" if own else told, _traceback(lines)
    return f"{who}: {raised}" if who and raised else who or raised


def _traceback(lines: Sequence[str]) -> str:
    """The exception of a traceback: its last line. Lines of several ranks may be mixed."""
    within = False
    for line in lines:
        if TRACEBACK in line:
            within = True
        elif within and line and not line[0].isspace():
            return line.strip()
    return ""


def _help(lines: Sequence[str]) -> str:
    """The first help text of Open MPI, between two lines of dashes, that not every failure has."""
    blocks = re.split(r"-{40,}", " ".join(lines))[1::2]
    texts = [" ".join(block.split()) for block in blocks]
    told = [text for text in texts if not re.match("Primary job|mpirun detected|$", text)]
    return told[0][:300] if told else ""


def _end(code: int) -> str:
    if code - 128 in signal.valid_signals():
        return f"a rank was ended by {_signal(code - 128)}; the launcher does not say which"
    ended = f"was ended by {_signal(-code)}" if code < 0 else f"exited with code {code}"
    return f"the launcher {ended}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"
