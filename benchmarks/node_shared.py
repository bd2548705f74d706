"""Averaging a buffer inside one node, beside MPI_Allreduce, gloo and the bandwidth of memory.

    python -m benchmarks.node_shared

It runs 2 ranks with one core each, then 4 ranks that share two cores. Each rank has a buffer of 16,
64 or 256 MB of float32, which it has just written, as a backward pass does. The time of their sum
is measured from a barrier until the last rank has finished. (No candidate divides by the number of
ranks. Ours does it earlier, when it moves gradients into their bucket.) These are the candidates:

- ours, every buffer: each rank sums its part of all buffers and writes the result to all of them.
- ours, in place: each rank leaves its part of the result in its own buffer, where all ranks can
  read it. This is enough for an optimizer that updates a part of the parameters on each rank.
- MPI_Allreduce, blocking and in place, and torch.distributed.all_reduce over gloo.
- the bounds. Each of p ranks with S bytes has to read its part of p buffers, which is S bytes in
  all. It has to write S bytes for a result in every buffer, or S / p bytes for a result in place.
  The bound is a stream copy by torch that moves the same number of bytes, by all ranks at the same
  time. It copies S bytes, or (S + S / p) / 2 bytes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch

from benchmarks import harness
from benchmarks.gradient_averaging import start_gloo
from hpc_train.mpi import runtime
from hpc_train.mpi.levels import Levels

SIZES = (16, 64, 256)  # MB
RANKS = (2, 4)
EVERY, IN_PLACE = "ours, every buffer", "ours, in place"
BOUNDS = {EVERY: "bound, every buffer", IN_PLACE: "bound, in place"}
MPI, GLOO = "MPI_Allreduce", "gloo"


def measure(options: argparse.Namespace) -> None:
    """Measure all sizes, on each rank."""
    started = runtime.start_runtime()
    start_gloo(started.world.comm)
    torch.set_num_threads(1)
    levels, found = Levels.of(started.world), {}
    for size in SIZES:
        found[size] = measure_size(levels, size, options.rounds)
    if started.world.rank == 0:
        harness.hand_back(options.result, found)
    torch.distributed.destroy_process_group()
    started.close()


def measure_size(levels: Levels, size: int, rounds: int) -> harness.Samples:
    """Measure all candidates in turn for one size."""
    from benchmarks import summing
    from hpc_train.gradients.sums import LevelSums

    group, repeat = levels.whole, max(SIZES) // size
    polite = group.size > (os.cpu_count() or 1)
    buckets = [summing.bucket(size * summing.MB)] * 2
    sums = LevelSums(levels, buckets, None, whole=[True, False])
    flat = torch.empty(buckets[0].numel)
    moved = (len(flat) + len(flat) // group.size) // 2
    candidates: dict[str, Callable[[], float]] = {
        EVERY: summing.ours(EVERY, sums, 0, polite, repeat),
        IN_PLACE: summing.ours(IN_PLACE, sums, 1, polite, repeat),
        MPI: summing.allreduce(group, flat, repeat),
        GLOO: summing.gloo(group, flat, repeat),
        BOUNDS[EVERY]: summing.copy(group, flat, len(flat), repeat),
        BOUNDS[IN_PLACE]: summing.copy(group, flat, moved, repeat),
    }
    samples = harness.in_turn(candidates, rounds)
    del candidates
    sums.close()
    return samples


def report(key: str, samples: harness.Samples) -> dict[str, float]:
    """Print a table. Returns the ratios of the others' times to ours."""
    milliseconds = {name: [1e3 * s for s in values] for name, values in samples.items()}
    harness.show(key, "ms", milliseconds, MPI)
    return {
        f"{key}: {other} / {mine}": harness.paired_ratio(samples, other, mine)
        for mine, bound in BOUNDS.items()
        for other in (MPI, GLOO, bound)
    }


def main() -> None:
    """Start first two ranks, then four, and print their results."""
    options = harness.arguments("averaging inside one node", rounds=11)
    if options.result:
        measure(options)
        return
    ratios, middles, module = {}, {}, "benchmarks.node_shared"
    for ranks, size, samples in harness.sweep(module, RANKS, rounds=options.rounds):
        key = f"{ranks} ranks, {size} MB"
        ratios |= report(key, samples)
        middles |= {f"{key}: {n}": value for n, value in harness.medians(samples).items()}
    harness.finish("node_shared", ratios, middles, options.json)


if __name__ == "__main__":
    main()
