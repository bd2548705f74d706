"""Starts jobs again and again, and kills ranks, stand-ins, servers and launchers at random moments.

    python -m tests.system.warm_soak [--starts 1000] [--ranks 2] [--seed 0] [--cold]

Each start has to end, with all that belongs to it. At the end no process, no socket and no shared
memory may be left. With --cold nothing is forked, which shows what a killed Open MPI leaves.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from hpc_train.warm import key
from tests.programs import COLD, ENVIRON, python, wait_for_end

KINDS = ("nothing", "rank", "stand-in", "server", "launcher")
PROGRAM = """
import sys, time
import torch, numpy
from mpi4py import MPI
sum_ = MPI.COMM_WORLD.allreduce(1)
assert sum_ == MPI.COMM_WORLD.size
time.sleep(float(sys.argv[2]))
"""
SHARED = Path("/dev/shm")


def found(folder: Path) -> dict[str, list[psutil.Process]]:
    """The processes of a job, by kind."""
    kinds: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "hpc_train.warm.server" in words and folder.name in words:
                kinds["server"].append(process)
            elif str(folder) in words and words.startswith("mpirun"):
                kinds["launcher"].append(process)
            elif str(folder) in words and "warm/__main__.py" in words:
                kinds["stand-in"].append(process)
            elif str(folder) in words:
                kinds["rank"].append(process)
    return kinds


def start(folder: Path, ranks: int, random: Random, environ: dict[str, str]) -> str:
    """One start, in which something may be killed; returns what was."""
    program = [str(folder / "program.py"), str(folder), str(round(random.uniform(0, 0.3), 2))]
    words = ["mpirun", "-np", str(ranks), *python(*program)]
    kind = random.choice(KINDS)
    with subprocess.Popen(
        words, env=ENVIRON | environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        time.sleep(random.uniform(0, 0.8))
        victims = found(folder)[kind]
        if victims:
            with suppress(psutil.Error):
                random.choice(victims).kill()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"a job in which {kind} was killed has not ended") from None
    wait_for_end(folder, 10)
    return kind if victims else "nothing"


def main() -> None:
    """Run the starts; fails if anything hangs or is left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("starts", 1000), ("ranks", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    random, killed = Random(options.seed), Counter[str]()
    before = set(SHARED.iterdir())
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        environ = {key.WARM: folder.name, key.LINGER: "3"}
        begin = time.monotonic()
        for _ in range(options.starts):
            killed[start(folder, options.ranks, random, COLD if options.cold else environ)] += 1
        seconds = time.monotonic() - begin
        time.sleep(5)
        left = [process for kind in found(folder).values() for process in kind]
    new = {path.name for path in set(SHARED.iterdir()) - before}
    print(f"{options.starts} starts of {options.ranks} ranks in {seconds:.0f} s")
    print(f"killed: {dict(killed)}")
    print(f"left: {len(left)} processes, {len(new)} files in {SHARED}")
    if left or new:
        raise SystemExit(f"left behind: {left} {sorted(new)}")


if __name__ == "__main__":
    main()
