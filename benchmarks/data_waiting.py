"""How long a step waits for its samples, and how long a run takes to find a step's samples.

    python -m benchmarks.data_waiting [--rounds 3] [--steps 200] [--jobs NAME ...]

- waiting: `data_seconds` / `step_seconds` of metrics.jsonl, on rank 0 of two ranks, without the
  first record, which has step 1 alone. The jobs are the main one (a GPT of 11 million parameters, 1
  x 128 tokens per rank, text in shards), and examples/forecast.py (chunked and compressed HDF5).
- resume: the time until a new process has the samples of a step in the middle of 10^12 described
  samples, in batches of 512: with blocks of 128 samples, and in full shuffle. Imports do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.gpt_step import SHAPE
from benchmarks.program import CONFIG, RANKS
from hpc_train.data.prepare.work import prepare_text
from hpc_train.mpi import environment

EXAMPLE = Path(__file__).parents[1] / "examples" / "forecast.py"
MAIN, ARRAYS = "main job", "example of arrays"
EPOCH_STEPS = 24  # of the example
SAMPLES = 10**12
BLOCKS = {"by blocks": 128, "full shuffle": 1}
FIND = """
import time
from hpc_train.data.order import SampleOrder
begin = time.perf_counter()
order = SampleOrder({samples}, 512, seed=1, block={block})
order.indices(order.steps_per_epoch // 2, 0, 512)
print(time.perf_counter() - begin)
"""


def waiting(words: list[str], folder: Path, run: Path) -> float:
    """Run a program on all ranks. Returns the share of a step that it waited for samples."""
    command = ["mpirun", "-np", str(RANKS), "--oversubscribe", sys.executable, *words]
    root = {"PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    environ = environment.for_launcher(os.environ) | root
    done = subprocess.run(
        [*command, "--run.dir", str(run)],
        env=environ,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{words} failed:\n{done.stdout}\n{done.stderr}")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    waited = total = 0.0
    for before, record in pairwise(records):
        steps = record["step"] - before["step"]
        waited += steps * record["data_seconds"]
        total += steps * record["step_seconds"]
    return waited / total


def finding(block: int) -> float:
    """Milliseconds until a new process has the samples of a step."""
    words = [sys.executable, "-c", FIND.format(samples=SAMPLES, block=block)]
    return 1e3 * float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure both jobs and both orders in turn."""
    parser = argparse.ArgumentParser(description="waiting for samples")
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of each job")
    parser.add_argument(
        "--jobs", nargs="+", metavar="NAME", choices=(MAIN, ARRAYS), default=[MAIN, ARRAYS]
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_text([Path(torch.__file__).parent / "optim"], folder / "data", shard_mb=1)
        (folder / "main.yaml").write_text(CONFIG.format(**SHAPE, data="data", batch=RANKS))
        epochs = max(1, options.steps // EPOCH_STEPS)
        jobs = {
            MAIN: ["-m", "hpc_train", "train", "main.yaml", "--run.steps", str(options.steps)],
            ARRAYS: [str(EXAMPLE), "--run.epochs", str(epochs), "--data.validation_every", "0"],
        }
        numbers = iter(range(1000))

        def share(job: str) -> float:
            return waiting(jobs[job], folder, folder / f"run-{next(numbers)}")

        candidates = {job: lambda job=job: share(job) for job in jobs if job in options.jobs}
        waits = harness.in_turn(candidates, options.rounds, warmup=0)
    found = harness.in_turn(
        {name: lambda block=block: finding(block) for name, block in BLOCKS.items()}, 5
    )
    harness.show("waiting for samples", "of a step", waits, next(iter(waits)))
    harness.show(f"a step of {SAMPLES:.0e} samples", "ms", found, "full shuffle")
    middles = {f"waiting, {job}": value for job, value in harness.medians(waits).items()}
    middles |= {f"resume, {name}, ms": value for name, value in harness.medians(found).items()}
    harness.finish("data_waiting", {}, middles, options.json)


if __name__ == "__main__":
    main()
