"""Time of commands that only print something or write a small file, beside python itself.

    python -m benchmarks.startup

The limit is an interpreter that does nothing. The peer is one that imports torch, as programs of
this kind commonly do before they print their help.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks import harness
from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import connect
from hpc_train.mpi.group import Group

LIMIT = "python -c pass"
STEPS = (100, 200, 300)


def candidates(run: Path) -> dict[str, tuple[list[str], str]]:
    """Map each candidate to its command line and to a text that it has to print.

    Args:
        run: a run directory with checkpoints.
    """
    program = [sys.executable, "-m", "hpc_train"]
    return {
        "hpc-train --help": ([*program, "--help"], "VERB"),
        "hpc-train cancel": ([*program, "cancel", str(run)], "the run stops"),
        "hpc-train checkpoint list": ([*program, "checkpoint", "list", str(run)], "complete"),
        "hpc-train train --help": ([*program, "train", "--help"], "--run.dir"),
        LIMIT: ([sys.executable, "-c", "pass"], ""),
        "import torch": ([sys.executable, "-c", "import torch; print('torch')"], "torch"),
    }


def make_run(run: Path) -> None:
    """Make a run directory with checkpoints of a model of a hundred tensors."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(50)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(
        run / "checkpoints", connect(Group()), TrainingState(model, optimizer)
    )
    for step in STEPS:
        checkpoints.save(step)


def timed(command: list[str], expected: str) -> Callable[[], float]:
    """Make a function that times a command. It fails if the command does not print `expected`."""

    def measure() -> float:
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - begin
        if expected not in done.stdout:
            raise RuntimeError(f"{command} printed {done.stdout!r}")
        return seconds

    return measure


def main() -> None:
    """Run all commands in turn."""
    options = harness.arguments("seconds until a short command is done", rounds=15)
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder))
        measured = {name: timed(*how) for name, how in candidates(Path(folder)).items()}
        found = harness.in_turn(measured, options.rounds)
    harness.show("start-up", "seconds", found, LIMIT)
    ratios = {name: harness.paired_ratio(found, name, LIMIT) for name in found}
    harness.finish("startup", ratios, harness.medians(found), options.json)


if __name__ == "__main__":
    main()
