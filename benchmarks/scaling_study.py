"""The prediction of a scaling study, checked where the truth is known: 8 hosts from 1, 2 and 4.

    python -m benchmarks.scaling_study [--repeats 2] [--mbit 100] [--weak 1]

Each of 8 emulated hosts has one rank and a link of known bandwidth in each direction. The compute
of a step is a wait in the loss, for a fixed time per sample, so ranks do not compete for this
machine's cores. The gradients cross the links. Runs on 1, 2, 4 and 8 hosts take turns. The model of
`hpc-train scale` is fitted to those on 1, 2 and 4 hosts, and its prediction for 8 is printed beside
what was measured, and beside the time by wait and bandwidth alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import harness
from hpc_train.config.file import load
from hpc_train.mpi import runtime as runtimes
from hpc_train.scaling.fit import STRONG, WEAK, left_out, predictions
from hpc_train.scaling.results import MeasuredRun, read_run
from hpc_train.scaling.summary import time_points
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

NAME = "scaling_study"
HOSTS = (1, 2, 4, 8)
FITTED = 4  # largest number of hosts that the model is fitted to
STEPS, WARMUP = 10, 3
BATCH = 32
WAIT = 0.05  # seconds of compute per sample
WIDTH = 700  # the model has WIDTH x WIDTH parameters


class Waiting(nn.Module):
    """A model of one matrix, whose loss takes a fixed time per sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, samples: Tensor) -> Tensor:
        """The loss of samples of shape (number, WIDTH)."""
        time.sleep(WAIT * len(samples))
        return self.matrix(samples).square().mean()


def measure(options: argparse.Namespace) -> None:
    """Run a performance test on each rank."""
    directory = Path(options.result).parent / "run"
    torch.set_num_threads(1)
    runtime = runtimes.start_runtime()
    batch = BATCH * (runtime.world.size if options.weak else 1)
    keys = {
        "run.dir": directory,
        "run.performance_test": STEPS,
        "run.preflight": "false",
        "run.deterministic": "true",  # the ring, whatever is faster here
        "data.batch": batch,
        "optimizer.name": "sgd",
    }
    config = load(None, [f"--{key}={value}" for key, value in keys.items()])
    task = TrainingTask(Waiting, TensorDataset(torch.zeros(8 * batch, WIDTH)))
    with redirect_stdout(sys.stderr), Trainer(config, task, runtime) as trainer:
        trainer.train()
    if runtime.world.rank == 0:
        hosts = runtime.world.size
        harness.hand_back(options.result, asdict(read_run(directory, hosts, WARMUP)))
    runtime.close()


def known_seconds(hosts: int, mbit: int, *, weak: bool) -> float:
    """The time of a step by the wait and the bandwidth alone."""
    waited = WAIT * BATCH / (1 if weak else hosts)
    return waited + 2 * (hosts - 1) / hosts * 4 * WIDTH**2 / (mbit / 8 * 1e6)


def run_all(options: argparse.Namespace) -> list[MeasuredRun]:
    """Run all numbers of hosts in turn."""
    found = []
    with harness.emulated_hosts(HOSTS[-1], 1, options.mbit) as cluster:
        for _ in range(options.repeats):
            for hosts in HOSTS:
                some = replace(cluster, names=cluster.names[:hosts])
                words = ["--weak", str(options.weak)]
                told = harness.on_hosts(some, "slot", f"benchmarks.{NAME}", *words)
                run = MeasuredRun(**told)
                print(f"{hosts} hosts: {run.median:.4f} s, {run.told['shared_cores'] or 'alone'}")
                found.append(run)
    return found


def main() -> None:
    """Run all numbers of hosts, fit, and compare."""
    options = harness.arguments(__doc__ or "", repeats=2, mbit=100, weak=0)
    if options.result:
        measure(options)
        return
    runs = run_all(options)
    weak = bool(options.weak)
    basis = WEAK if weak else STRONG
    points = time_points(runs)
    fitted = [point for point in points if point.nodes <= FITTED]
    predicted = {one.nodes: one for one in predictions(fitted, basis, HOSTS)}
    table = Table("hosts", "measured s", "+-", "model s", "90 % interval", "off", "known s")
    for point in points:
        one = predicted[point.nodes]
        off = one.seconds / point.seconds - 1
        table.add_row(
            str(point.nodes),
            f"{point.seconds:.4f}",
            f"{point.error:.4f}",
            f"{one.seconds:.4f}{'' if point.nodes <= FITTED else ' (predicted)'}",
            f"{one.low:.4f} to {one.high:.4f}",
            f"{off:+.1%}",
            f"{known_seconds(point.nodes, options.mbit, weak=weak):.4f}",
        )
    Console(width=100).print(table)
    print(f"off on {FITTED} hosts when fitted to fewer: {left_out(fitted, basis):+.1%}")
    measured = {point.nodes: point.seconds for point in points}
    last = HOSTS[-1]
    ratios = {f"predicted by measured, {last} hosts": predicted[last].seconds / measured[last]}
    middles = {f"{hosts} hosts, s": seconds for hosts, seconds in measured.items()}
    middles[f"{last} hosts predicted, s"] = predicted[last].seconds
    middles["steps that count"] = statistics.median(len(run.seconds) for run in runs)
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
