"""Time and memory that ranks take to start, forked from one process or each by itself.

    python -m benchmarks.warm_start

Cold: each rank imports torch, numpy and h5py. First: one process per node imports them, and has to
be started, too. Warm: that process runs already, as at a restart. Times are measured from the
command to the end of a first Allreduce, and from the command to the first step of a training. The
limit is the same program without those imports. Memory is the proportional resident set
(smaps_rollup of proc(5)) of all processes below the launcher, and of the fork server.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, pairwise, repeat
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from hpc_train.warm import key, meeting, stand_in

IMPORTS = "import torch, numpy, h5py"
PROGRAM = """
import sys, time
begun = time.time()
{imports}
imported = time.time()
from mpi4py import MPI
world = MPI.COMM_WORLD
started = time.time()
assert world.allreduce(1) == world.size
summed = time.time()
times = [world.reduce(t, MPI.MAX) for t in (begun, imported, started, summed)]
if world.rank == 0:
    print(*times, flush=True)
if {waits}:
    sys.stdin.read()
"""
CONFIG = """
run: {{steps: 3, log_every: 1, dir: {folder}/run}}
model: {{layers: 2, hidden: 32, heads: 2, sequence: 32}}
data: {{path: {folder}/data, batch: 32}}
"""
SHARES = ("process", "imports", "MPI_Init", "Allreduce")


def environ(name: str, linger: float) -> dict[str, str]:
    """Variables for a launcher whose ranks share the fork server `name`; "off" starts them cold."""
    warm = {key.WARM: name, key.LINGER: str(linger), key.WHY: "1", key.LOAD: "program"}
    return harness.environ() | warm | {"OMPI_MCA_mpi_yield_when_idle": "1"}


class Starts:
    """Starts a program of a few lines on ranks.

    Args:
        folder: the folder for the program.
        ranks: number of ranks.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.shares: dict[str, list[list[float]]] = {}
        self.memory: dict[str, int] = {}

    def timed(self, kind: str, names: Iterator[str], linger: float) -> Callable[[], float]:
        """Make a function that measures seconds from the command to the end of an Allreduce."""

        def measure() -> float:
            begin = time.time()
            done = subprocess.run(
                self._words(kind, waits=False),
                env=environ(next(names), linger),
                capture_output=True,
                text=True,
                check=True,
            )
            if "starts cold" in done.stderr:
                raise RuntimeError(done.stderr)
            times = [begin, *map(float, done.stdout.split())]
            steps = [later - earlier for earlier, later in pairwise(times)]
            self.shares.setdefault(kind, []).append(steps)
            return times[-1] - begin

        return measure

    def measure_memory(self, kind: str, server: str) -> None:
        """Measure the proportional resident memory of the ranks while all of them run."""
        with subprocess.Popen(
            self._words(kind, waits=True),
            env=environ(server, 30),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            below = psutil.Process(process.pid).children(recursive=True)
            others = [p for p in psutil.process_iter() if _is_of(p, self.folder, server)]
            self.memory[kind] = sum(one.memory_full_info().pss for one in {*below, *others})
            process.communicate()

    def _words(self, kind: str, *, waits: bool) -> list[str]:
        path = self.folder / f"{kind}-{waits}.py"
        imports = "" if kind == "no imports" else IMPORTS
        path.write_text(PROGRAM.format(imports=imports, waits=waits))
        program = stand_in.command([str(path)])
        if kind in ("cold", "no imports"):
            program = [sys.executable, str(path)]
        return [*harness.mpirun(self.ranks, bind=False), *program]


def _is_of(process: psutil.Process, folder: Path, server: str) -> bool:
    with suppress(psutil.Error):
        words = " ".join(process.cmdline())
        return str(folder) in words or f"/{server} " in words
    return False


def first_step(folder: Path, ranks: int, *options: str) -> Callable[[], float]:
    """Make a function that measures seconds from `hpc-train launch` to the first step's end."""
    config = folder / "small.yaml"
    config.write_text(CONFIG.format(folder=folder))

    def measure() -> float:
        subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
        words = [sys.executable, "-m", "hpc_train", "launch", "-np", str(ranks), *options]
        given = {n: v for n, v in environ("off", 0).items() if not n.startswith("HPC_TRAIN_WARM")}
        begin = time.time()
        metrics, seconds = folder / "run/metrics.jsonl", 0.0
        with subprocess.Popen(
            [*words, "--", "train", str(config)], env=given, stdout=subprocess.DEVNULL
        ) as process:
            while process.poll() is None and not seconds:
                if metrics.exists() and "\n" in metrics.read_text():
                    seconds = time.time() - begin
                time.sleep(0.01)
        if process.returncode or not seconds:
            raise RuntimeError(f"the training ended with {process.returncode}")
        return seconds

    return measure


def show(ranks: int, starts: Starts) -> None:
    """Print the times of the parts of a start, and the memory."""
    table = Table("start", *SHARES, "memory MiB", title=f"{ranks} ranks: seconds of each part")
    for kind, rows in starts.shares.items():
        middles = [f"{statistics.median(column):.2f}" for column in zip(*rows, strict=True)]
        memory = f"{starts.memory[kind] >> 20}" if kind in starts.memory else ""
        table.add_row(kind, *middles, memory)
    Console(width=100).print(table)


def main() -> None:
    """Start 1, 8 and 32 ranks, warm and cold in turn."""
    options = harness.arguments("start of ranks", rounds=5, most=32)
    ratios: dict[str, float] = {}
    middles: dict[str, float] = {}
    for ranks in (number for number in (1, 8, 32) if number <= options.most):
        with tempfile.TemporaryDirectory(prefix="warm-start-") as name:
            folder, shared = Path(name), Path(name).name
            starts = Starts(folder, ranks)
            candidates = {
                "cold": starts.timed("cold", repeat("off"), 0),
                "first": starts.timed("first", map(f"{shared}-{{}}".format, count()), 0),
                "warm": starts.timed("warm", repeat(shared), 600),
                "no imports": starts.timed("no imports", repeat("off"), 0),
            }
            samples = harness.in_turn(candidates, options.rounds)
            for kind, server in (("cold", "off"), ("warm", shared)):
                starts.measure_memory(kind, server)
            meeting.dismiss(shared)
            title = f"{ranks} ranks: command to first Allreduce"
            harness.show(title, "seconds", samples, "no imports")
            show(ranks, starts)
            middles |= {f"{ranks} {n}": value for n, value in harness.medians(samples).items()}
            middles |= {f"{ranks} MiB {n}": size >> 20 for n, size in starts.memory.items()}
            ratios[f"{ranks} cold / warm"] = harness.paired_ratio(samples, "cold", "warm")
            ratios[f"{ranks} cold / first"] = harness.paired_ratio(samples, "cold", "first")
            words = ["prepare", "text", str(Path(json.__file__).parent), "--out", f"{folder}/data"]
            subprocess.run(
                [sys.executable, "-m", "hpc_train", *words], check=True, capture_output=True
            )
            kinds = {"cold": ("--cold",), "first": ("--max_restarts", "1")}
            steps = {kind: first_step(folder, ranks, *how) for kind, how in kinds.items()}
            samples = harness.in_turn(steps, max(1, options.rounds // 2), warmup=0)
            title = f"{ranks} ranks: hpc-train launch to the end of the first step"
            harness.show(title, "seconds", samples, "first")
            middles |= {f"{ranks} step {n}": v for n, v in harness.medians(samples).items()}
    harness.finish("warm_start", ratios, middles, options.json)


if __name__ == "__main__":
    main()
