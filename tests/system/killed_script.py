"""Kills a script written for Horovod at random moments, and compares what it comes to.

    python -m tests.system.killed_script --kills 10 --seed 0

The script is examples/horovod_script_resumable.py on two ranks, under each launcher. A rank, or
what has started the ranks, is killed or asked to stop while the script starts or trains. The same
command is run again until it is through (`hpc-train launch` starts the ranks again by itself). Its
last checkpoint has to be, bit for bit, that of a run which nobody disturbed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import psutil

from hpc_train.errors import EXIT_STOPPED
from tests.programs import ENVIRON, hpc_train, python, ranks_of
from tests.waiting import wait_until

SCRIPT = str(Path(__file__).parents[2] / "examples" / "horovod_script_resumable.py")
LAST = "runs/hvd/step-000000200.safetensors"
SECONDS = 180.0  # after which a run hangs


def commands() -> dict[str, list[str]]:
    """The command line of two ranks, by launcher."""
    ranks = python(SCRIPT)
    return {
        "horovodrun": ["horovodrun", "-np", "2", "-H", "localhost:2", *ranks],
        "mpirun": ["mpirun", "-np", "2", *ranks],
        "hpc-train launch": hpc_train("launch", "-np", "2", "--", "python", SCRIPT),
    }


def start(words: list[str], folder: Path) -> subprocess.Popen:
    """Start it; what it prints goes to a file."""
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(words, env=ENVIRON, cwd=folder, stdout=output, stderr=output)


def disturb(process: subprocess.Popen, random: Random, seconds: float) -> str:
    """Kill something of a run, or ask it to stop, after some time; returns what was done."""
    time.sleep(random.uniform(0, seconds))
    found = ranks_of(process) or [psutil.Process(process.pid)]
    what, victim, number = random.choice(
        [
            ("SIGKILL to a rank", random.choice(found), signal.SIGKILL),
            ("SIGKILL to the launcher", psutil.Process(process.pid), signal.SIGKILL),
            ("SIGTERM to the launcher", psutil.Process(process.pid), signal.SIGTERM),
        ]
    )
    with suppress(psutil.Error):
        victim.send_signal(number)
    return what


def many(
    folder: Path, launcher: str, kills: int, seed: int, say: Callable[[str], None]
) -> dict[str, int]:
    """Disturb runs of one launcher until so many kills are done; returns how often each was."""
    words, random = commands()[launcher], Random(seed)
    alone = folder / "alone"
    alone.mkdir()
    begin = time.monotonic()
    assert start(words, alone).wait(SECONDS) == 0, (alone / "output").read_text()
    seconds = time.monotonic() - begin
    expected = (alone / LAST).read_bytes()
    done: dict[str, int] = {}
    run = 0
    while sum(done.values()) < kills:
        run += 1
        root = folder / f"run-{run}"
        root.mkdir()
        for attempt in range(100):
            process = start(words, root)
            before = ""
            if attempt < 3 and sum(done.values()) < kills:
                before = disturb(process, random, seconds)
            code = process.wait(SECONDS)
            wait_for_ranks(root)
            if before and code:
                done[before] = done.get(before, 0) + 1
                say(f"{launcher}, run {run}: {before}, exit code {code}")
            if code == 0:
                break
            allowed = before or code == EXIT_STOPPED
            assert allowed, f"exit code {code}: {(root / 'output').read_text()[-3000:]}"
        assert (root / LAST).read_bytes() == expected, f"{launcher}, run {run} differs"
    return done


def wait_for_ranks(root: Path) -> None:
    """Wait until no process works in the folder."""
    wait_until(
        lambda: not any(_works_in(process, root) for process in psutil.process_iter()), SECONDS
    )


def _works_in(process: psutil.Process, root: Path) -> bool:
    with suppress(psutil.Error):
        return process.cwd() == str(root)
    return False


def main() -> None:
    """Try and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for launcher in commands():
        with tempfile.TemporaryDirectory() as name:
            done = many(
                Path(name), launcher, options.kills, options.seed, partial(print, flush=True)
            )
        print(f"{launcher}: the same to the last bit after {done}")


if __name__ == "__main__":
    main()
