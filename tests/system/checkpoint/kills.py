"""Kills a rank, all ranks or the launcher at every call of a save, and looks what is left.

    python -m tests.system.checkpoint.kills [--ranks 3] [--sample N] [--how posix|mpiio|background]

Each case is a job of its own: it resumes from step 2, and is killed while it saves step 3. Then one
process has to find step 2 or step 3, complete. Without --sample all calls of all ranks are tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from hpc_train.checkpoint import fileformat
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from tests.checkpoint.faults import Call, faults, kill
from tests.checkpoint.states import SMALL, found, save, store
from tests.programs import ENVIRON, python, wait_for_end

ALL, LAUNCHER = -1, -2  # what is killed, besides a rank by its number
LAUNCHER_PID = "launcher-pid"
SECONDS = 60.0  # after which a job hangs


class Case(NamedTuple):
    """What is killed at which of its calls; the launcher, at one of rank 0's."""

    who: int
    call: int


def kill_launcher(directory: Path) -> Callable[..., Any]:
    """A fault that ends mpirun without warning; this rank goes on."""

    def fault(name: str, function: Call, *arguments: Any) -> Any:
        os.kill(int((directory / LAUNCHER_PID).read_text()), signal.SIGKILL)
        return function(*arguments)

    return fault


def rank(directory: Path, case: Case | None, how: str) -> None:
    """What each rank does."""
    started = runtime.start_runtime()
    group = started.world
    made = store(directory, group, "mpiio" if how == "mpiio" else "posix", keep=1)
    assert made.resume() == 2
    mine = case is not None and case.who in (group.rank, ALL)
    if case is not None and case.who == LAUNCHER and group.rank == 0:
        mine = True
    fault = kill_launcher(directory) if case is not None and case.who == LAUNCHER else kill
    with faults(fault, case.call if case is not None and mine else -1) as seen:
        save(made, 3, background=how == "background")
    if case is None:
        counts = group.comm.allgather(len(seen.names))
        if group.rank == 0:
            (directory / "counts").write_text(json.dumps(counts))
    started.close()


def job(ranks: int, directory: Path, case: Case | None, how: str) -> int:
    """Run the ranks; returns mpirun's exit code."""
    words = ["mpirun", "-np", str(ranks), *python("-m", "tests.system.checkpoint.kills")]
    words += ["--directory", str(directory), "--how", how]
    words += ["--case", json.dumps(case)] if case is not None else []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=ENVIRON, **pipes) as process:
        (directory / LAUNCHER_PID).write_text(str(process.pid))
        process.communicate(timeout=SECONDS)
    wait_for_end(directory, SECONDS)
    return process.returncode


def prepare(directory: Path) -> None:
    """A folder with the checkpoint of step 2."""
    save(store(directory, Group()), 2)


def cases(ranks: int, folder: Path, how: str) -> list[Case]:
    """All there are, by the calls that a save which is not disturbed makes."""
    prepare(folder)
    code = job(ranks, folder, None, how)
    assert code == 0, code
    counts = json.loads((folder / "counts").read_text())
    each = [Case(who, call) for who, count in enumerate(counts) for call in range(count)]
    together = [Case(who, call) for who in (ALL, LAUNCHER) for call in range(counts[0])]
    return each + together


def try_case(ranks: int, folder: Path, case: Case, how: str) -> int:
    """The step that is found after a case.

    Raises:
        AssertionError: nothing is found, or what is found is not what was saved.
    """
    folder.mkdir()
    prepare(folder)
    code = job(ranks, folder, case, how)
    assert code != 0, case
    step = found(folder, Group())
    assert step in (2, 3), case
    shutil.rmtree(folder)
    return step


def main() -> None:
    """Try the cases, or be one of the ranks of one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--how", choices=["posix", "mpiio", "background"], default="mpiio")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--case", type=json.loads)
    options = parser.parse_args()
    vars(fileformat).update(SMALL)
    if options.directory:
        rank(options.directory, Case(*options.case) if options.case else None, options.how)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tried = cases(options.ranks, folder / "counted", options.how)
        if options.sample:
            tried = Random(options.seed).sample(tried, options.sample)
        steps = Counter(
            try_case(options.ranks, folder / "case", case, options.how) for case in tried
        )
    print(f"{len(tried)} kills: {steps[2]} left step 2, {steps[3]} left step 3, none left neither")


if __name__ == "__main__":
    main()
