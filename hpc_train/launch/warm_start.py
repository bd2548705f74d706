"""How a launched job's ranks are forked from one process per node (hpc_train/warm)."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.warm import meeting, stand_in
from hpc_train.warm.key import LINGER, LOAD, WARM, is_off

RESTART = 30.0  # seconds that a node's fork server waits for a restart of the job


def variables(ranks_per_host: int, restarts: int, *, cold: bool) -> dict[str, str]:
    """The variables by which ranks find their node's fork server; empty where it gains nothing.

    Args:
        ranks_per_host: number of ranks on the fullest host.
        restarts: maximum number of restarts.
        cold: whether each rank imports its libraries itself.
    """
    if cold:
        return {WARM: "off"}
    if WARM in os.environ:  # whoever started this launcher has named a server
        names = (WARM, LINGER, LOAD)
        return {name: os.environ[name] for name in names if name in os.environ}
    if ranks_per_host == 1 and not restarts:
        return {}
    name = f"launch-{meeting.short_name(socket.gethostname())}-{os.getpid()}-{time.time_ns():x}"
    return {WARM: name, LINGER: str(RESTART if restarts else 0.0)}


def warm_command(words: Sequence[str], warm: Mapping[str, str]) -> list[str]:
    """A command whose ranks are forked; unchanged if it does not run a program of this Python."""
    same = list(words)
    if WARM not in warm or is_off(warm):
        return same
    python, program = shutil.which(words[0]), same[1:]
    own = Path(sys.executable)
    # A folder of programs may have several Pythons. A virtual environment's leads out of it.
    if python is None or Path(python).parent != own.parent or not own.samefile(python):
        return same
    if program[:1] == ["-u"]:  # launched ranks never buffer their output
        del program[0]
    runs = program[:1] == ["-m"] or (program and program[0].endswith(".py"))
    return stand_in.command(program) if runs and Path(python).name.startswith("python") else same


def dismiss_servers(warm: Mapping[str, str]) -> None:
    """End this node's fork server of a launched job; those of other nodes end by themselves."""
    if warm.get(WARM, "").startswith("launch-"):
        meeting.dismiss(warm[WARM])
