"""A training step on several ranks of one machine, with each way to average the gradients.

    python -m benchmarks.gradient_averaging [--rounds 9]

All candidates train the same GPT of 11 M parameters with a fused AdamW, in one MPI job, in turn:

- ours with engine mpi, also with zero 1, and ours with engine horovod.
- Horovod's DistributedOptimizer as its documentation uses it.
- torch's DistributedDataParallel over gloo.
- one flat MPI_Allreduce after the backward pass.
- the ceiling: ranks that do not communicate.

Light is 1 x 128 tokens per rank and step, heavy 8 x 128. Two ranks have a core each. Four ranks
share the cores that there are.

Horovod's background thread asks MPI for work every millisecond, which slows down everything else in
its process. So it runs only in the turns of candidates that use Horovod, and with their settings.
Ranks that wait in MPI yield their core only in the turn of our engine horovod, which sets this.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks import harness
from benchmarks.gpt_step import LOADS, SHAPE
from hpc_train.gradients.options import AveragingOptions
from hpc_train.models import GPT

Step = Callable[[], None]
CEILING, MPI, ZERO = "no communication", "ours, mpi", "ours, mpi, zero 1"
HOROVOD, STOCK, DDP, FLAT = "ours, horovod", "stock Horovod", "DDP, gloo", "flat Allreduce"
OURS, OTHERS = (MPI, ZERO, HOROVOD), (CEILING, DDP, STOCK, FLAT)
RANKS = (2, 4)


def build() -> tuple[GPT, Optimizer]:
    """The model and optimizer that every candidate starts with."""
    torch.manual_seed(0)
    model = GPT(**SHAPE)
    return model, AdamW(model.parameters(), lr=3e-4, fused=True)


def plain_step(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> Step:
    """The textbook step. Gradients are averaged, if at all, inside backward or step."""

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return step


def averager_step(model: nn.Module, averager: object, batch: tuple[Tensor, Tensor]) -> Step:
    """Our step."""

    def step() -> None:
        averager.zero_grad()
        model(*batch).backward()
        averager.average()
        averager.step()

    return step


def flat_step(batch: tuple[Tensor, Tensor], comm: object) -> tuple[GPT, Step]:
    """A step with one MPI_Allreduce over a copy of all gradients."""
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
    """A step with Horovod's DistributedOptimizer and its defaults."""
    model, optimizer = build()
    named = model.named_parameters()
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=named)
    return model, plain_step(model, distributed, batch)


def ddp(batch: tuple[Tensor, Tensor]) -> tuple[GPT, Step]:
    """A step with torch's DistributedDataParallel and its defaults."""
    model, optimizer = build()
    wrapped = nn.parallel.DistributedDataParallel(model)
    return model, plain_step(wrapped, optimizer, batch)


def start_gloo(comm: object) -> None:
    """Start torch.distributed over gloo with the ranks of the MPI job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = comm.bcast(probe.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=comm.rank, world_size=comm.size)


class Candidates:
    """Models and steps by the names above, and Horovod's settings for the candidates that use it.

    Horovod runs while the candidates are made, and later only in `running`.
    """

    def __init__(self, batch: tuple[Tensor, Tensor], group: object) -> None:
        self.batch, self.group, self.averagers = batch, group, []
        alone, optimizer = build()
        self.made = {CEILING: (alone, plain_step(alone, optimizer, batch))}
        self.made[MPI] = self.ours(engine="mpi")
        self.made[ZERO] = self.ours(engine="mpi", zero=1)
        own = horovod_settings()
        self.made[HOROVOD] = self.ours(engine="horovod")
        self.settings = {HOROVOD: horovod_settings(), STOCK: own}
        import horovod.torch as hvd

        self.hvd = hvd
        hvd.shutdown()
        with self.running(STOCK):
            self.made[STOCK] = stock_horovod(batch, hvd)
        self.made[DDP] = ddp(batch)
        self.made[FLAT] = flat_step(batch, group.comm)

    def ours(self, **options: object) -> tuple[GPT, Step]:
        """A candidate with one of our averagers."""
        from hpc_train.gradients import average_gradients

        model, optimizer = build()
        self.averagers.append(
            average_gradients(model, optimizer, self.group, AveragingOptions(**options))
        )
        return model, averager_step(model, self.averagers[-1], self.batch)

    def close(self) -> None:
        """Close the averagers. Collective."""
        with self.running(HOROVOD):
            for averager in self.averagers:
                averager.close()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """A context in which Horovod's background thread runs, if this candidate uses it."""
        if name not in self.settings:
            yield
            return
        from hpc_train.mpi.runtime import yield_while_waiting

        before = horovod_settings()
        set_horovod(self.settings[name])
        yield_while_waiting(name == HOROVOD)
        self.hvd.init()
        try:
            yield
        finally:
            self.hvd.shutdown()
            set_horovod(before)
            yield_while_waiting(False)


def horovod_settings() -> dict[str, str]:
    """The settings that Horovod will read when it starts."""
    return {key: value for key, value in os.environ.items() if key.startswith("HOROVOD_")}


def set_horovod(settings: Mapping[str, str]) -> None:
    """Set the settings that Horovod will read, and remove all others."""
    for key in horovod_settings():
        del os.environ[key]
    os.environ |= settings


def measure(options: argparse.Namespace) -> None:
    """Measure all candidates, on each rank."""
    from hpc_train.mpi import runtime as runtimes

    runtime = runtimes.start_runtime()
    group = runtime.world
    start_gloo(group.comm)
    torch.set_num_threads(1)
    found = {}
    for load, count in LOADS.items():
        torch.manual_seed(group.rank)
        text = torch.randint(SHAPE["vocab"], (count, SHAPE["sequence"] + 1))
        candidates = Candidates((text[:, :-1], text[:, 1:]), group)
        found[load] = run(candidates, count, options.rounds)
        check({name: model for name, (model, _) in candidates.made.items() if name != CEILING})
        candidates.close()
        del candidates
        gc.collect()
    if group.rank == 0:
        harness.hand_back(options.result, found)
    torch.distributed.destroy_process_group()
    runtime.close()


def run(candidates: Candidates, count: int, rounds: int) -> harness.Samples:
    """The tokens per second of all candidates, measured in turn."""
    group, steps = candidates.group, 8 // count + 1
    tokens = count * SHAPE["sequence"] * group.size

    def timed(name: str, step: Step) -> float:
        with candidates.running(name):
            step()
            harness.meet(group)
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            harness.meet(group)
            return tokens * steps / (time.perf_counter() - begin)

    turns = {name: partial(timed, name, step) for name, (_, step) in candidates.made.items()}
    return harness.in_turn(turns, rounds)


def check(models: dict[str, GPT]) -> None:
    """Check that all candidates that average have reached the same weights."""
    flat = {n: torch.cat([p.detach().view(-1) for p in m.parameters()]) for n, m in models.items()}
    first = flat[MPI]
    for name, other in flat.items():
        difference = float((other - first).abs().max())
        if difference > 1e-3:
            raise RuntimeError(f"{name} has other weights than ours: {difference}")


def main() -> None:
    """Start the ranks and show what they found."""
    options = harness.arguments("gradient averaging on one machine", rounds=9)
    if options.result:
        measure(options)
        return
    ratios, middles = {}, {}
    pairs = [(mine, other) for mine in OURS for other in OTHERS]
    pairs += [(other, CEILING) for other in OTHERS[1:]]
    module = "benchmarks.gradient_averaging"
    for ranks, load, samples in harness.sweep(module, RANKS, rounds=options.rounds):
        key = f"{ranks} ranks, {load}"
        harness.show(f"{key}: {LOADS[load]} x 128 tokens per rank", "tokens/s", samples, CEILING)
        ratios |= {
            f"{key}: {mine} / {other}": harness.paired_ratio(samples, mine, other)
            for mine, other in pairs
        }
        middles |= {f"{key}: {n}": value for n, value in harness.medians(samples).items()}
    show_ratios(ratios)
    harness.finish("gradient_averaging", ratios, middles, options.json)


def show_ratios(ratios: Mapping[str, float]) -> None:
    """Print the ratios of ours to each other candidate."""
    table = Table("", *(f"/ {other}" for other in OTHERS), title="ratios, paired by round")
    for key in dict.fromkeys(key.split(" / ")[0] for key in ratios):
        found = (ratios.get(f"{key} / {other}") for other in OTHERS)
        table.add_row(key, *("" if ratio is None else f"{ratio:.3f}" for ratio in found))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
