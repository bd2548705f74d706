"""Time of a step in a loop of one's own: with `hpc_train.Loop`, and with the libraries of others.

    python -m benchmarks.own_loop [--rounds 5] [--steps 1000] [--width 128]

The model is a small perceptron, so that what a library adds to a step can be seen. Each rank takes
32 samples per step. Each candidate is a job of its own; the jobs are started in turn. One table has
torch's TensorDataset, another one a data set that gives one sample at a time. `Loop` looks in each
step whether such a data set has drawn random numbers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import hpc_train
from benchmarks import harness
from benchmarks.gradient_averaging import start_gloo
from hpc_train.mpi.runtime import Runtime

SAMPLES, BATCH, WARM = 6400, 32, 100
WHOLE, SINGLE = "TensorDataset", "one sample at a time"
PLAIN, LOOP, DDP, STOCK = "plain loop", "Loop", "DDP, gloo", "stock Horovod"
CANDIDATES = {  # with their numbers of ranks
    "plain loop, 1 rank": (PLAIN, 1),
    "Loop, 1 rank": (LOOP, 1),
    "Loop, 2 ranks": (LOOP, 2),
    "DDP, gloo, 2 ranks": (DDP, 2),
    "stock Horovod, 2 ranks": (STOCK, 2),
}
PAIRS = (
    ("Loop, 1 rank", "plain loop, 1 rank"),
    ("Loop, 2 ranks", "DDP, gloo, 2 ranks"),
    ("Loop, 2 ranks", "stock Horovod, 2 ranks"),
)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A data set that gives one sample at a time, as most do."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Training:
    """What every candidate starts with, and the time of its steps."""

    def __init__(self, kind: str, width: int, steps: int) -> None:
        torch.manual_seed(0)
        x, y = torch.randn(SAMPLES, 64), torch.randint(0, 10, (SAMPLES,))
        self.dataset = TensorDataset(x, y) if kind == WHOLE else Samples(x, y)
        hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self.model: nn.Module = nn.Sequential(*hidden, nn.Linear(width, 10))
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.ends: list[float] = []  # when each step was over
        self.most = WARM + steps

    @property
    def over(self) -> bool:
        """Whether enough steps were taken."""
        return len(self.ends) >= self.most

    @property
    def seconds(self) -> float:
        """The median time from the end of a step to the end of the next."""
        pairs = zip(self.ends[WARM:], self.ends[WARM + 1 :], strict=False)
        return statistics.median(after - before for before, after in pairs)

    def take(self, batches: Iterator[Any]) -> None:
        """Take a step with each batch, until there are enough."""
        for x, y in batches:
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.ends.append(time.perf_counter())
            if self.over:
                return


def with_loop(training: Training, runtime: Runtime) -> None:
    """Take the steps with our loop."""
    batch = BATCH * runtime.world.size
    with tempfile.TemporaryDirectory() as folder:
        loop = hpc_train.Loop(
            runtime,
            runtime.world.from_first(lambda: folder),
            training.model,
            training.optimizer,
            hpc_train.LoopOptions(every=10**9),
        )
        for _, batches in loop.epochs(training.dataset, batch=batch, epochs=10**6):
            training.take(batches)
            if training.over:
                loop.stop()
                next(batches, None)  # it ends after the step in which it was stopped
        loop.close()
        runtime.world.barrier()


def with_others(training: Training, runtime: Runtime, way: str) -> None:
    """Take the steps as the documentation of torch or Horovod has it."""
    world, sampler = runtime.world, None
    if way == DDP:
        start_gloo(world.comm)
        training.model = nn.parallel.DistributedDataParallel(training.model)
    elif way == STOCK:
        import horovod.torch as hvd

        hvd.init()
        named = training.model.named_parameters()
        training.optimizer = hvd.DistributedOptimizer(training.optimizer, named_parameters=named)
    if world.size > 1:
        sampler = DistributedSampler(training.dataset, world.size, world.rank)
    loader = DataLoader(training.dataset, BATCH, shuffle=sampler is None, sampler=sampler)
    while not training.over:
        training.take(iter(loader))


def on_rank(options: argparse.Namespace) -> None:
    """What each rank does."""

    def program(runtime: Runtime) -> None:
        training = Training(options.kind, options.width, options.steps)
        if options.way == LOOP:
            with_loop(training, runtime)
        else:
            with_others(training, runtime, options.way)
        if runtime.world.rank == 0:
            harness.hand_back(options.result, training.seconds)

    raise SystemExit(hpc_train.run(program))


def main() -> None:
    """Measure all candidates in turn, with both kinds of data sets."""
    parser = harness.parser(str(__doc__), rounds=5, steps=1000, width=128)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        on_rank(options)
    words = ["--steps", str(options.steps), "--width", str(options.width)]
    ratios, middles = {}, {}
    for kind in (WHOLE, SINGLE):

        def measure(way: str, ranks: int, kind: str = kind) -> float:
            more = [*words, "--kind", kind, "--way", way]
            return 1e3 * float(harness.on_ranks(ranks, "benchmarks.own_loop", *more))

        turns = {name: partial(measure, *of) for name, of in CANDIDATES.items()}
        samples = harness.in_turn(turns, options.rounds, warmup=0)
        harness.show(kind, "ms/step", samples, "plain loop, 1 rank")
        middles |= {f"{kind}, {name}": value for name, value in harness.medians(samples).items()}
        for ours, theirs in PAIRS:
            ratios[f"{kind}, {ours} / {theirs}"] = harness.paired_ratio(samples, ours, theirs)
    harness.finish("own_loop", ratios, middles, options.json)


if __name__ == "__main__":
    main()
