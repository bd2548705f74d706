"""A training step on several ranks of one machine, with each way to average the gradients.

    python -m benchmarks.gradient_averaging [--ranks 2]

All candidates train the same GPT of 11 M parameters with a fused AdamW, in one MPI job, in turn:
ours (both engines), Horovod's DistributedOptimizer as its documentation uses it, torch's
DistributedDataParallel over gloo, one flat MPI_Allreduce after the backward pass, and ranks that do
not communicate: the ceiling. Light: 1 x 128 tokens per rank and step; heavy: 8 x 128.

Horovod's background thread asks MPI for work every millisecond, which slows down everything else
in its process. It therefore runs only while a candidate that uses Horovod has its turn.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks import harness
from benchmarks.gpt_step import LOADS, SHAPE
from hpc_train.models import GPT

Step = Callable[[], None]
CEILING = "no communication"
NAMES = (CEILING, "ours, mpi", "ours, horovod", "stock Horovod", "DDP, gloo", "flat Allreduce")


def build() -> tuple[GPT, Optimizer]:
    """The model and optimizer that every candidate starts with."""
    torch.manual_seed(0)
    model = GPT(**SHAPE)
    return model, AdamW(model.parameters(), lr=3e-4, fused=True)


def plain_step(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> Step:
    """The textbook step; whatever averages does so inside backward or step."""

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return step


def averager_step(engine: str, batch: tuple[Tensor, Tensor], group: object) -> tuple[GPT, Step]:
    """Our step."""
    from hpc_train.gradients import average_gradients

    model, optimizer = build()
    averager = average_gradients(model, optimizer, group, engine=engine)

    def step() -> None:
        averager.zero_grad()
        model(*batch).backward()
        averager.average()
        averager.step()

    return model, step


def flat_step(batch: tuple[Tensor, Tensor], comm: object) -> tuple[GPT, Step]:
    """One MPI_Allreduce over a copy of all gradients."""
    from mpi4py import MPI

    model, optimizer = build()

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        gradients = [p.grad for p in model.parameters()]
        flat = torch.cat([g.view(-1) for g in gradients])
        comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat /= comm.size
        for g, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(averaged.view_as(g))
        optimizer.step()

    return model, step


def stock_horovod(batch: tuple[Tensor, Tensor], hvd: object) -> tuple[GPT, Step]:
    """DistributedOptimizer with its defaults."""
    model, optimizer = build()
    named = model.named_parameters()
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=named)
    return model, plain_step(model, distributed, batch)


def ddp(batch: tuple[Tensor, Tensor]) -> tuple[GPT, Step]:
    """DistributedDataParallel with its defaults."""
    model, optimizer = build()
    wrapped = nn.parallel.DistributedDataParallel(model)
    return model, plain_step(wrapped, optimizer, batch)


def start_gloo(comm: object) -> None:
    """Give torch.distributed the ranks of the MPI job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = comm.bcast(probe.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=comm.rank, world_size=comm.size)


def make_candidates(batch: tuple[Tensor, Tensor], runtime: object) -> Iterator[tuple[GPT, Step]]:
    """In the order of NAMES."""
    import horovod.torch as hvd

    alone, optimizer = build()
    yield alone, plain_step(alone, optimizer, batch)
    yield averager_step("mpi", batch, runtime.world)
    yield averager_step("horovod", batch, runtime.world)
    yield stock_horovod(batch, hvd)
    yield ddp(batch)
    yield flat_step(batch, runtime.world.comm)


@contextmanager
def hvd_running(hvd: object) -> Iterator[None]:
    """Run Horovod's background thread for a while."""
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()


def measure(options: argparse.Namespace) -> None:
    """What each rank does."""
    from hpc_train.mpi import runtime as runtimes

    runtime = runtimes.start()
    comm = runtime.world.comm
    hvd = runtimes.start_horovod(runtime.world)
    start_gloo(comm)
    torch.set_num_threads(1)
    found = {}
    for load, count in LOADS.items():
        torch.manual_seed(comm.rank)
        text = torch.randint(SHAPE["vocab"], (count, SHAPE["sequence"] + 1))
        batch = (text[:, :-1], text[:, 1:])
        tokens, steps = batch[0].numel() * comm.size, 8 // count + 1
        candidates = dict(zip(NAMES, make_candidates(batch, runtime), strict=True))

        hvd.shutdown()

        def timed(name: str, step: Step, tokens: int = tokens, steps: int = steps) -> float:
            with hvd_running(hvd) if "orovod" in name else nullcontext():
                step()
                comm.Barrier()
                begin = time.perf_counter()
                for _ in range(steps):
                    step()
                comm.Barrier()
                return tokens * steps / (time.perf_counter() - begin)

        turns = {name: partial(timed, name, step) for name, (_, step) in candidates.items()}
        found[load] = harness.in_turn(turns, options.rounds)
        hvd.init()
        check({name: model for name, (model, _) in candidates.items() if name != CEILING})
    if comm.rank == 0:
        harness.hand_back(options.result, found)
    torch.distributed.destroy_process_group()
    runtime.close()


def check(models: dict[str, GPT]) -> None:
    """All candidates that average must have arrived at the same weights."""
    flat = {n: torch.cat([p.detach().view(-1) for p in m.parameters()]) for n, m in models.items()}
    first = flat["ours, mpi"]
    for name, other in flat.items():
        difference = float((other - first).abs().max())
        if difference > 1e-3:
            raise RuntimeError(f"{name} has other weights than ours: {difference}")


def main() -> None:
    """Start the ranks and show what they found."""
    options = harness.arguments("gradient averaging on one machine", ranks=2, rounds=9)
    if options.result:
        measure(options)
        return
    name = "benchmarks.gradient_averaging"
    found = harness.on_ranks(options.ranks, name, "--rounds", str(options.rounds))
    ratios, middles = {}, {}
    for load, samples in found.items():
        title = f"{load}: {LOADS[load]} x 128 tokens per rank, {options.ranks} ranks"
        harness.show(title, "tokens/s", samples, CEILING)
        for candidate in NAMES[1:]:
            ratios[f"{load} {candidate}"] = harness.paired_ratio(samples, candidate, CEILING)
        middles |= {f"{load} {n}": value for n, value in harness.medians(samples).items()}
    harness.finish("gradient_averaging", ratios, middles, options.json)


if __name__ == "__main__":
    main()
