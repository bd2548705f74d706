"""What it costs to save memory: recomputation, the optimizer's state on a disk, and pipelines.

    python -m benchmarks.memory_time [--rounds 6] [--offload 1] [--pipelines 1] [--mbit 8000]

*Recomputation*: a training step of one process with AdamW, with none, selective and full in turn,
for three sizes of a GPT.

*Offload*: a training step of one process with AdamW, with the optimizer's state in memory and in a
file of --folder in turn. The kernel may keep the file's pages in its cache. To make the disk work,
run the program in a cgroup that has too little memory for them.

*Pipelines*: bytes that leave a host in a step, counted at its interfaces, with memory.zero 3
divided by those with memory.zero 0. Four hosts have 2 ranks each. Both ranks of a host form a
pipeline, so there are four replicas.

--rounds 0, --offload 0 and --pipelines 0 leave out a part. Pipelines need what benchmarks.two_level
needs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from benchmarks import harness
from benchmarks.memory import sent
from hpc_train.config.file import load
from hpc_train.host.allocator import keep_freed_memory
from hpc_train.models import GPT
from hpc_train.mpi import runtime
from hpc_train.parallel.recompute import RecomputeBlocks, recompute
from hpc_train.training.offload import OffloadedState
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

HOSTS, SLOTS = 4, 2
WAYS: tuple[RecomputeBlocks, ...] = ("none", "selective", "full")
SHAPES = {  # samples, and the sizes of the GPT
    "4 x 256 tokens, 384 channels": (4, {"sequence": 256, "hidden": 384, "heads": 6, "layers": 6}),
    "2 x 512 tokens, 768 channels": (2, {"sequence": 512, "hidden": 768, "heads": 12, "layers": 4}),
    "1 x 256 tokens, 384 channels": (1, {"sequence": 256, "hidden": 384, "heads": 6, "layers": 6}),
}
OFFLOADED = {"sequence": 256, "hidden": 512, "heads": 8, "layers": 8}
TRAINED = {"vocab": 256, "sequence": 64, "layers": 6, "hidden": 384, "heads": 6}
MICRO_BATCHES = (1, 2, 4)
STEPS = 2  # steps that are counted, after two others


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# Recomputation.


def recomputing(samples: int, sizes: dict[str, int], how: RecomputeBlocks) -> Callable[[], None]:
    """A training step."""
    torch.manual_seed(0)
    model = GPT(vocab=256, **sizes)  # type: ignore[arg-type]
    recompute(model, how)
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (samples, sizes["sequence"] + 1))

    def once() -> None:
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    return once


def report_recomputation(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Print a table for each size. Returns ratios to none, and medians in ms."""
    ratios, middles = {}, {}
    for title, (samples, sizes) in SHAPES.items():
        ways = {str(how): recomputing(samples, sizes, how) for how in WAYS}
        # Each figure is a median of three, because one step is short.
        calls = {how: partial(_several, call) for how, call in ways.items()}
        found = harness.in_turn(calls, rounds, shuffled=True)
        harness.show(f"recomputation, {title}", "ms", found, "none")
        for how in found:
            ratios[f"{title}, {how}"] = harness.paired_ratio(found, how, "none")
        middles |= {f"{title}, {how}": value for how, value in harness.medians(found).items()}
    return ratios, middles


def _several(call: Callable[[], None]) -> float:
    return sorted(1e3 * seconds_of(call) for _ in range(3))[1]


# The optimizer's state on a disk.


def training(folder: Path | None) -> Callable[[], dict[str, float]]:
    """A training step, which returns the ms that it takes in all, and in the optimizer's step."""
    torch.manual_seed(0)
    model = GPT(vocab=256, **OFFLOADED)  # type: ignore[arg-type]
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    if folder is not None:
        OffloadedState(optimizer, folder)
    tokens = torch.randint(256, (4, OFFLOADED["sequence"] + 1))

    def step() -> dict[str, float]:
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        middle = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        return {"step": 1e3 * (end - begin), "optimizer": 1e3 * (end - middle)}

    return step


def report_offload(rounds: int, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Print a table. Returns ratios to the state in memory, and medians in ms."""
    ratios, middles = {}, {}
    steps = {"in memory": training(None), "in a file": training(folder)}
    found: dict[str, harness.Samples] = {
        what: {name: [] for name in steps} for what in ("step", "optimizer")
    }
    for number in range(rounds + 2):
        for name, step in steps.items():
            for what, value in step().items():
                if number > 1:
                    found[what][name].append(value)
    for what, samples in found.items():
        harness.show(f"offload, {what}", "ms", samples, "in memory")
        ratios[f"offload, {what}"] = harness.paired_ratio(samples, "in a file", "in memory")
        middles |= {f"offload, {what}, {n}": v for n, v in harness.medians(samples).items()}
    return ratios, middles


# Pipelines.


def measure_pipelines() -> dict[str, dict[str, float]]:
    """Bytes that leave this host in a step, for each number of micro-batches and stage of zero."""
    job = runtime.start_runtime()
    torch.set_num_threads(1)
    tokens = torch.randint(256, (64, 65), generator=torch.Generator().manual_seed(0))
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as own:
        root = Path(job.world.from_first(lambda: own))
        for number in MICRO_BATCHES:
            of: dict[str, float] = {}
            for zero in (0, 3):
                begin = []
                for steps in (2, 2 + STEPS):
                    before = sent()
                    train(job, root / f"{number} {zero} {steps}", number, zero, steps, tokens)
                    job.world.barrier()
                    begin.append(sent() - before)
                of[f"zero {zero}"] = (begin[1] - begin[0]) / STEPS
            found[f"{number} micro-batches"] = of
        job.world.barrier()
    job.close()
    return found


def train(
    job: runtime.Runtime,
    directory: Path,
    micro_batches: int,
    zero: int,
    steps: int,
    tokens: torch.Tensor,
) -> None:
    """Train some steps with a pipeline on each host. Collective."""
    words = {
        "run.dir": directory,
        "run.steps": steps,
        "run.preflight": "false",
        "data.batch": 8 * HOSTS,
        "data.micro_batch": 8 // micro_batches,
        "parallel.pp": SLOTS,
        "memory.zero": zero,
        "gradients.bucket_mb": 4,
    }
    torch.manual_seed(0)
    task = TrainingTask(
        GPT(**TRAINED),  # type: ignore[arg-type]
        TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        private_parameters=True,
    )
    options = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    with redirect_stdout(StringIO()), Trainer(load(None, options), task, job) as trainer:
        trainer.train()


def report_pipelines(mbit: int) -> tuple[dict[str, float], dict[str, float]]:
    """Print a table. Returns ratios of zero 3 to zero 0, and MB."""
    with harness.emulated_hosts(HOSTS, SLOTS, mbit) as cluster:
        found = harness.on_hosts(cluster, "slot", "benchmarks.memory_time", "--measure")
    ratios, middles = {}, {}
    print("pipelines: MB that leave a host in a step, zero 0 and zero 3")
    for name, of in found.items():
        ratios[f"pipelines, {name}"] = ratio = of["zero 3"] / of["zero 0"]
        middles |= {f"pipelines, {name}, {zero}": value / 1e6 for zero, value in of.items()}
        print(f"  {name:18} {of['zero 0'] / 1e6:8.1f} {of['zero 3'] / 1e6:8.1f}  {ratio:.3f}")
    return ratios, middles


def main() -> None:
    """Run the parts, or a rank of the last one."""
    parser = argparse.ArgumentParser(description="what it costs to save memory")
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    for name, default in (("rounds", 6), ("offload", 1), ("pipelines", 1), ("mbit", 8000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where offload's file is")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        found = measure_pipelines()
        if int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == 0:
            harness.hand_back(given.result, found)
        return
    torch.set_num_threads(1)
    keep_freed_memory()
    parts = (
        (given.rounds, partial(report_recomputation, given.rounds)),
        (given.offload, partial(report_offload, max(4, given.rounds), given.folder)),
        (given.pipelines, partial(report_pipelines, given.mbit)),
    )
    harness.finish_parts("memory_time", parts, given.json)


if __name__ == "__main__":
    main()
