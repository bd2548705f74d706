"""Training steps over slow links: averaging during the backward pass, and after it.

The ranks of benchmarks.two_level run this in its second part. All candidates train the same GPT of
4.8 M parameters with a fused AdamW and 2 x 128 tokens per rank and step. All have to reach the same
weights. They average with our two levels and the ring between hosts. The buckets have --bucket KiB
or, if that is 0, the size that `average_gradients` would choose. Either the hooks of the backward
pass advance the averaging (`Progress`), or a thread does (`ThreadProgress`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from benchmarks import harness
from benchmarks.gradient_averaging import averager_step, plain_step
from hpc_train.gradients.progress import Progress, ThreadProgress
from hpc_train.models import GPT
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels

if TYPE_CHECKING:
    from hpc_train.gradients.mpi import BucketAverager

SHAPE = {"vocab": 256, "sequence": 128, "layers": 6, "hidden": 256, "heads": 4}
SAMPLES = 2  # samples per rank
STEPS = 3  # number of steps in a measurement, which takes their mean
BACKWARD, WIRE, PROCESSORS = "backward", "wire", "processors"
CEILING = "step, no communication"
HOOKS, THREAD = "step, overlap by hooks", "step, overlap by a thread"
BEHIND = "step, sums after backward"

Batch = tuple[Tensor, Tensor]
Averagers = dict[str, tuple[GPT, "BucketAverager"]]


def build() -> tuple[GPT, AdamW]:
    """The model and optimizer that every candidate starts with."""
    torch.manual_seed(0)
    model = GPT(**SHAPE)
    return model, AdamW(model.parameters(), lr=3e-4, fused=True)


def averagers(levels: Levels, size: int) -> tuple[Averagers, int]:
    """A model and an averager for each candidate, and the buckets' size in bytes. Collective."""
    from hpc_train.collectives.ring import Ring
    from hpc_train.gradients.autotune import bucket_size
    from hpc_train.gradients.buckets import Bucket, plan_buckets
    from hpc_train.gradients.mpi import BucketAverager
    from hpc_train.gradients.sums import LevelSums

    make = lambda buckets: LevelSums(levels, buckets, Ring(levels.cross))  # noqa: E731
    total = sum(parameter.nbytes for parameter in build()[0].parameters())
    size = size or bucket_size(levels.whole, make, total)

    def averager(progress: Progress, *, early: bool = True) -> tuple[GPT, BucketAverager]:
        model, optimizer = build()

        def made(parameters: Sequence[Parameter]) -> tuple[list[Bucket], LevelSums]:
            buckets = [Bucket(some) for some in plan_buckets(parameters, size)]
            sums = make(buckets)
            sums.early = early
            return buckets, sums

        return model, BucketAverager(model, optimizer, levels.whole, made, progress)

    ways = {
        HOOKS: averager(Progress(polite=True)),
        THREAD: averager(ThreadProgress(polite=True)),
        BEHIND: averager(Progress(polite=True), early=False),
    }
    return ways, size


def repeated(group: Group, step: Callable[[], None]) -> float:
    """Seconds of a step."""
    return harness.elapsed(group, lambda: [step() for _ in range(STEPS)]) / STEPS


def backward(group: Group, model: GPT, batch: Batch) -> float:
    """Seconds of a backward pass of all ranks at the same time, without communication."""
    total = 0.0
    for _ in range(STEPS):
        model.zero_grad()
        total += harness.elapsed(group, model(*batch).backward)
    return total / STEPS


def wire(group: Group, averager: BucketAverager) -> float:
    """Seconds for the sums of all buckets, while no rank computes."""
    return harness.elapsed(group, partial(sum_all, averager))


def processors(group: Group, averager: BucketAverager) -> float:
    """Seconds for which these sums would occupy all of this machine's cores."""
    assert group.comm is not None
    begin = time.process_time()
    sum_all(averager)
    return group.comm.allreduce(time.process_time() - begin) / (os.cpu_count() or 1)


def sum_all(averager: BucketAverager) -> None:
    """Sum all buckets. Collective."""
    progress = Progress(polite=True)
    for number in range(len(averager.buckets)):
        progress.start(averager.sums.begin(number))
    progress.finish()


def measure(levels: Levels, rounds: int, size: int) -> tuple[harness.Samples, int]:
    """Measure all candidates in turn. Also returns the buckets' size in bytes. Collective."""
    group = levels.whole
    torch.manual_seed(group.rank)
    text = torch.randint(SHAPE["vocab"], (SAMPLES, SHAPE["sequence"] + 1))
    batch = (text[:, :-1], text[:, 1:])
    ours, size = averagers(levels, size)
    hooks = ours[HOOKS][1]
    candidates: dict[str, Callable[[], float]] = {
        BACKWARD: partial(backward, group, build()[0], batch),
        WIRE: partial(wire, group, hooks),
        PROCESSORS: partial(processors, group, hooks),
        CEILING: partial(repeated, group, plain_step(*build(), batch)),
    }
    for name, (model, averager) in ours.items():
        candidates[name] = partial(repeated, group, averager_step(model, averager, batch))
    samples = harness.in_turn(candidates, rounds)
    check(ours)
    for _, averager in ours.values():
        averager.close()
    return samples, size


def check(ours: Averagers) -> None:
    """Check that all candidates that average have reached the same weights."""
    flat = {
        name: torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        for name, (model, _) in ours.items()
    }
    for name, weights in flat.items():
        difference = float((weights - flat[BEHIND]).abs().max())
        if difference > 1e-3:
            raise RuntimeError(f"{name}: other weights than {BEHIND}: {difference}")
