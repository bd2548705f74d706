"""Time that tensor parallelism loses to communication, beside the bare MPI calls that it needs.

    python -m benchmarks.tensor_parallel

Two ranks with one core each share a GPT of 11 M parameters, and run its forward and backward pass.
Light is 1 x 128 tokens, heavy 8 x 128. Each step also runs with collectives that return at once
("without"), and with barriers in place of collectives. Ranks wait for each other at any collective,
longer on a noisy machine, and no implementation can avoid that. So "lost" is the time of a step
minus its time with barriers. "Bare" is the time of the same MPI calls alone. The ranks begin them
together, on buffers of the same sizes that have just been written. "Nonblocking" does the same with
MPI's nonblocking calls, and waits for each at once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.gpt_step import SHAPE
from hpc_train.collectives import connect
from hpc_train.collectives.protocol import Collectives, Done
from hpc_train.models import GPT
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.parallel.tensor import parallelize

LOADS = {"light": 1, "heavy": 8}
Call = tuple[str, tuple[int, ...], torch.dtype, int]


class Switched:
    """Collectives that can be switched to barriers or to nothing, with an invented result."""

    def __init__(self, real: Collectives) -> None:
        self.group, self.real, self.mode = real.group, real, "real"
        self.calls: list[Call] = []
        self._made: dict[Call, Tensor] = {}

    def sum_(self, tensor: Tensor) -> None:
        """See `Collectives`."""
        if self._real("sum", tensor):
            self.real.sum_(tensor)

    def max_(self, tensor: Tensor) -> None:
        """See `Collectives`."""
        if self._real("max", tensor):
            self.real.max_(tensor)

    def start_sum_(self, tensor: Tensor) -> Any:
        """See `Collectives`."""
        return self.real.start_sum_(tensor) if self._real("start_sum", tensor) else Done(tensor)

    def start_gather(self, tensor: Tensor, dim: int) -> Any:
        """See `Collectives`."""
        if self._real("gather", tensor, dim):
            return self.real.start_gather(tensor, dim)
        return Done(self._like("gather", tensor, dim, self.group.size, 1))

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Any:
        """See `Collectives`."""
        if self._real("scatter", tensor, dim):
            return self.real.start_sum_scatter(tensor, dim)
        return Done(self._like("scatter", tensor, dim, 1, self.group.size))

    def _real(self, name: str, tensor: Tensor, dim: int = 0) -> bool:
        if self.mode == "real":
            self.calls.append((name, tuple(tensor.shape), tensor.dtype, dim))
        elif self.mode == "barriers":
            self.group.barrier()
        return self.mode == "real"

    def _like(self, name: str, tensor: Tensor, dim: int, times: int, parts: int) -> Tensor:
        key = (name, tuple(tensor.shape), tensor.dtype, dim)
        if key not in self._made:
            shape = list(tensor.shape)
            shape[dim] = shape[dim] * times // parts
            self._made[key] = torch.full(shape, 0.01, dtype=tensor.dtype)
        return self._made[key]


def bare(comm: Any, calls: list[Call], *, nonblocking: bool = False) -> Callable[[], float]:
    """Make a function that runs the same collectives by mpi4py alone and returns the seconds."""
    from mpi4py import MPI  # only ranks may start MPI

    size = comm.size
    numbers = [torch.ones(shape, dtype=dtype).numpy() for _, shape, dtype, _ in calls]
    others = [torch.ones(size, *shape, dtype=dtype).numpy() for _, shape, dtype, _ in calls]

    def begin(name: str, mine: Any, other: Any) -> Any:
        part = other.reshape(-1)[: mine.size // size]
        operation = MPI.MAX if name == "max" else MPI.SUM
        if name == "gather":
            return (comm.Iallgather if nonblocking else comm.Allgather)(mine, other)
        if name == "scatter":
            scatter = comm.Ireduce_scatter_block if nonblocking else comm.Reduce_scatter_block
            return scatter(mine, part, op=operation)
        return (comm.Iallreduce if nonblocking else comm.Allreduce)(
            MPI.IN_PLACE, mine, op=operation
        )

    def run() -> float:
        seconds = 0.0
        for (name, *_), mine, other in zip(calls, numbers, others, strict=True):
            mine.fill(1)  # now it is in this core's cache only, as after a matrix product
            comm.Barrier()
            start = time.perf_counter()
            begun = begin(name, mine, other)
            if nonblocking:
                begun.Wait()
            seconds += time.perf_counter() - start
        return seconds

    return run


def steps(switched: Switched, samples: int, cut: bool) -> tuple[Callable[[], None], list[Call]]:
    """Make a step of this rank's part of the model, and list the collectives of one step."""
    torch.manual_seed(0)
    model = GPT(**SHAPE)
    parallelize(model, model.tensor_plan, switched, sequence_parallel=cut)
    text = torch.randint(SHAPE["vocab"], (samples, SHAPE["sequence"] + 1))

    def step() -> None:
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        model.zero_grad()
        if switched.mode == "real" and not 4 < float(loss.detach()) < 8:
            raise RuntimeError(f"the loss is {float(loss.detach())}")

    switched.calls.clear()
    step()
    return step, list(switched.calls)


def prepared(group: Group, samples: int, cut: bool) -> dict[str, Callable[[], float | None]]:
    """The candidates to compare, by name."""
    switched = Switched(connect(group))
    step, calls = steps(switched, samples, cut)

    def instead(mode: str) -> None:
        switched.mode = mode
        step()
        switched.mode = "real"

    return {
        "tp 2": step,
        "with barriers": functools.partial(instead, "barriers"),
        "without": functools.partial(instead, "none"),
        "bare": bare(group.comm, calls),
        "nonblocking": bare(group.comm, calls, nonblocking=True),
    }


def on_rank(options: Any) -> None:
    """Measure all candidates in turn, on each rank."""
    torch.set_num_threads(1)
    started = runtime.start_runtime()
    group = started.world
    found: dict[str, list[float]] = {}

    def timed(run: Callable[[], float | None], repeat: int) -> float:
        group.barrier()
        begin = time.perf_counter()
        own = [run() for _ in range(repeat)]
        group.barrier()
        taken = time.perf_counter() - begin
        return (taken if own[0] is None else sum(own)) / repeat

    for load, samples in LOADS.items():
        for cut in (False, True):
            key = f"{load}{', sequence parallel' if cut else ''}"
            candidates = {
                f"{key}: {name}": functools.partial(timed, run, 32 // samples)
                for name, run in prepared(group, samples, cut).items()
            }
            found |= harness.in_turn(candidates, options.rounds)
    if group.rank == 0:
        harness.hand_back(options.result, found)
    started.close()


def main() -> None:
    """Start the ranks and report."""
    options = harness.arguments("communication of tensor parallelism", rounds=21)
    if options.result:
        on_rank(options)
        return
    rounds = ["--rounds", str(options.rounds)]
    found = harness.on_ranks(2, "benchmarks.tensor_parallel", *rounds)
    ratios = {}
    for key in dict.fromkeys(name.split(":")[0] for name in found):
        mine = {
            name: [1000 * s for s in seconds]
            for name, seconds in found.items()
            if name.startswith(f"{key}:")
        }
        harness.show(key, "ms", mine, f"{key}: without")
        middle = harness.medians(mine)
        lost = middle[f"{key}: tp 2"] - middle[f"{key}: with barriers"]
        needed = middle[f"{key}: bare"]
        waited = middle[f"{key}: with barriers"] - middle[f"{key}: without"]
        ratios[key] = lost / needed
        print(
            f"{key}: lost {lost:.2f} ms, bare {needed:.2f} ms, ratio {ratios[key]:.3f}; "
            f"ranks waiting for each other at {waited:.2f} ms besides"
        )
    harness.finish("tensor_parallel", ratios, harness.medians(found), options.json)


if __name__ == "__main__":
    main()
