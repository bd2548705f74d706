"""The bubble of each pipeline schedule, beside its formula, and the activations that it holds.

    python -m benchmarks.pipeline

Stages sleep instead of computing, so that eight of them fit on two cores. This measures how our
executor and MPI carry out a schedule. The time of all ranks goes from a common start to the end of
the last rank. The bubble is the share of it that is not the nominal time of the stages' work.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import harness
from hpc_train.mpi import runtime
from hpc_train.parallel.linear import Deferred
from hpc_train.parallel.pipeline import Pipeline
from hpc_train.parallel.schedule import Name, peak_live_formula
from hpc_train.parallel.simulate import Costs, bubble_formula
from hpc_train.parallel.stages import Stages

SECONDS = 0.02  # time of a stage's forward pass, of its input gradient, of its weight gradients
VIRTUAL_STAGES: dict[Name, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
STAGES, MICRO_BATCHES = (4, 8), (8, 32)


class _Sleep(torch.autograd.Function):
    """y = x + w. It sleeps for as long as a layer would compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        time.sleep(layer.seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        layer: Layer = ctx.layer

        def dweight() -> Tensor:
            time.sleep(layer.seconds)
            return dy.sum()

        time.sleep(layer.seconds)
        if layer.deferred is None:
            return dy.clone(), dweight(), None
        layer.deferred.waiting.append((layer.weight, dweight))
        return dy.clone(), None, None


class Layer(nn.Module):
    """A layer that takes a known time."""

    def __init__(self, seconds: float, deferred: Deferred | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds, self.deferred = seconds, deferred

    def forward(self, x: Tensor) -> Tensor:
        """Add the weight to x of shape (samples, 1000)."""
        weight = self.weight if self.deferred is None else self.weight.detach()
        y: Tensor = _Sleep.apply(x, weight, self)
        return y


class Model(nn.Module):
    """A model with a layer for each virtual stage. Each rank's layers take the same time in all."""

    def __init__(self, stages: int, virtual_stages: int, deferred: Deferred | None) -> None:
        super().__init__()
        made = (Layer(SECONDS / virtual_stages, deferred) for _ in range(stages * virtual_stages))
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the last layer's output."""
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def measure(group: Any, name: Name, micro_batches: int) -> dict[str, float]:
    """Measure one step under a schedule: its bubble, and the most activations that a rank held."""
    p, virtual_stages = group.size, VIRTUAL_STAGES[name]
    deferred = Deferred() if name == "zero_bubble" else None
    model = Model(p, virtual_stages, deferred)
    runs = [
        range(virtual_stage * p + group.rank, virtual_stage * p + group.rank + 1)
        for virtual_stage in range(virtual_stages)
    ]
    stages = Stages(model, [f"layers.{i}" for i in range(p * virtual_stages)], runs)
    pipeline = Pipeline(group, torch.device("cpu"), name, virtual_stages, stages, deferred)
    x = torch.ones(2, 1000, requires_grad=True)

    def step() -> None:
        pipeline.train(lambda number, virtual_stage: model(x), [2] * micro_batches)

    step()  # the first step sends shapes and allocates buffers
    group.barrier()
    begin = time.perf_counter()
    step()
    group.barrier()
    seconds = time.perf_counter() - begin
    for parameter in model.parameters():
        if not torch.allclose(parameter.grad, torch.tensor(2.0)):  # 1 for each of two steps
            raise RuntimeError(f"{name}: the gradient is {parameter.grad}")
    held = pipeline.peak_live
    promised = peak_live_formula(name, p, micro_batches, virtual_stages)
    return {
        "bubble": 1 - micro_batches * 3 * SECONDS / seconds,
        "over": group.largest(max(0, held - promised[group.rank])),
        "peak": group.largest(held),
        "promised": max(promised),
    }


def on_rank(options: Any) -> None:
    """Measure all schedules in turn, with one stage for each rank."""
    started = runtime.start_runtime()
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for micro_batches in MICRO_BATCHES:
            for name in VIRTUAL_STAGES:
                figures = measure(started.world, name, micro_batches)
                found.setdefault(f"{name} n={micro_batches}", []).append(figures)
    if started.world.rank == 0:
        harness.hand_back(options.result, found)
    started.close()


def main() -> None:
    """Measure four and eight stages."""
    options = harness.arguments("pipeline schedules with stages that sleep", rounds=5)
    if options.result:
        on_rank(options)
        return
    table = Table(
        "stages", "schedule", "bubble", "formula", "difference", "activations", "promised"
    )
    ratios, middles = {}, {}
    for p in STAGES:
        rounds = ["--rounds", str(options.rounds)]
        found = harness.on_ranks(p, "benchmarks.pipeline", *rounds, bind=False)
        for key, runs in found.items():
            name, n = key.split(" n=")
            if any(run["over"] for run in runs):
                sys.exit(f"{key}: a rank held more activations than the schedule promises")
            bubble = harness.medians({"": [run["bubble"] for run in runs]})[""]
            formula = bubble_formula(name, p, int(n), VIRTUAL_STAGES[name], Costs())
            cells = f"{bubble:.3f}", f"{formula:.3f}", f"{bubble - formula:+.3f}"
            table.add_row(f"{p}", key, *cells, f"{runs[0]['peak']}", f"{runs[0]['promised']}")
            ratios[f"{p} stages {key}"] = bubble / formula
            middles[f"{p} stages {key}"] = bubble
    Console(width=100).print(table)
    harness.finish("pipeline", ratios, middles, options.json)


if __name__ == "__main__":
    main()
