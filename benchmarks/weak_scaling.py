"""Growth of the time of a step with the number of ranks, extrapolated to a thousand ranks.

    python -m benchmarks.weak_scaling [--most 32]

1, 2, 4 ... 32 ranks of one machine each have the same GPT of 11 M parameters and 4 x 128 tokens per
step. In turn they take steps with ours (engine mpi, also with zero 1) and steps without
communication. 4 ranks also train smaller and larger models with 1 x 128 tokens. A model and an
optimizer for each candidate on 32 ranks would need more memory than a small machine has. So each
process has one model, and each candidate takes it over for its turn. The candidate starts from rank
0's first weights without optimizer state. It takes a step of few tokens, which touches its memory,
and then the steps that count.

The cost of averaging is fitted and extrapolated with the formulas of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import AdamW

from benchmarks import harness
from benchmarks.gpt_step import SHAPE
from benchmarks.gradient_averaging import CEILING, MPI, ZERO
from hpc_train.gradients.options import AveragingOptions
from hpc_train.models import GPT
from hpc_train.mpi.group import Group

NAME = "weak_scaling"
STEPS = {1: 8, 2: 8, 4: 4, 8: 2, 16: 1, 32: 1}  # maps the number of ranks to the steps of a turn
ROUNDS = {1: 3, 2: 7, 4: 5, 8: 5, 16: 4, 32: 4}
SAMPLES = 4
SIZES_RANKS, SIZES = 4, (192, 384, 576)  # number of ranks that train models of these widths
SIZES_STEPS = 4
RELATIVE_ERROR = 0.01  # share of the weights' change; Adam's first steps enlarge rounding errors
HOPS = 300
RANK_MIB = 600  # memory that a rank needs; most take about 530

# Assumptions about a large machine, on which each rank has a core of its own.
NODE_RANKS = 32
NETWORK_LATENCY = 5e-6
NETWORK_GBIT = (100, 200)
NODES = (1, 2, 4, 8, 16, 32)
LARGER = (124e6, 1.3e9)  # numbers of parameters
LAST_BUCKET = 4 << 20  # bytes whose sum begins only when the backward pass has ended
BACKWARD = 2 / 3  # share of the backward pass in the time of a step


class Trial:
    """The model of this process, which the candidates train in turn."""

    def __init__(self, group: Group, hidden: int, samples: int, steps: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(**SHAPE | {"hidden": hidden})
        self.optimizer = AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.group, self.steps = group, steps
        torch.manual_seed(group.rank)
        text = torch.randint(SHAPE["vocab"], (samples, SHAPE["sequence"] + 1))
        self.batch = (text[:, :-1], text[:, 1:])
        self.few = (text[:1, :16], text[:1, 1:17])
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.first = self._weights()
        self.run(self._reference)  # also makes torch allocate what it keeps for these shapes
        self.expected = self._weights()

    def _weights(self) -> list[Tensor]:
        """A copy of the weights. Only rank 0 keeps one."""
        return [p.detach().clone() for p in self.model.parameters() if self.group.rank == 0]

    def run(self, step: Callable[[tuple[Tensor, Tensor]], None]) -> float:
        """Seconds per step."""
        step(self.few)
        harness.meet(self.group)
        begin = time.perf_counter()
        for _ in range(self.steps):
            step(self.batch)
        harness.meet(self.group)
        return (time.perf_counter() - begin) / self.steps

    def alone(self) -> float:
        """Seconds per step without communication."""
        self.optimizer.state.clear()
        return self.run(self._plain)

    def averaged(self, zero: int) -> float:
        """Seconds per step with ours. Weights are compared with those by MPI_Allreduce."""
        from hpc_train.gradients import average_gradients

        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        with torch.no_grad():
            for p, first in zip(self.model.parameters(), self.first, strict=False):
                p.copy_(first)  # on rank 0 only; the others get the weights from it next
        averager = average_gradients(
            self.model, self.optimizer, self.group, AveragingOptions(engine="mpi", zero=zero)
        )

        def step(batch: tuple[Tensor, Tensor]) -> None:
            averager.zero_grad()
            self.model(*batch).backward()
            averager.step()

        seconds = self.run(step)
        self._check()
        averager.close()
        return seconds

    def _plain(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.model(*batch).backward()
        self.optimizer.step()

    def _reference(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.model(*batch).backward()
        if self.group.comm is not None:
            from mpi4py.MPI import IN_PLACE

            for p in self.model.parameters():
                self.group.comm.Allreduce(IN_PLACE, p.grad.numpy())
                p.grad /= self.group.size
        self.optimizer.step()

    def _check(self) -> None:
        """Check that all ranks have the same weights, and that these are right. Collective."""
        mine = [float(p.detach().sum()) for p in self.model.parameters()]
        everyone = self.group.comm.allgather(mine) if self.group.comm else [mine]
        wrong = self.group.from_first(self._error)
        if any(other != mine for other in everyone) or wrong > RELATIVE_ERROR:
            raise RuntimeError(f"wrong weights: {wrong} off, or not the same on all ranks")

    def _error(self) -> float:
        """The distance of the weights from the expected ones, relative to their change."""
        now = [p.detach() for p in self.model.parameters()]
        way, off = (
            math.hypot(*(float((a - b).norm()) for a, b in zip(self.expected, x, strict=True)))
            for x in (self.first, now)
        )
        return off / way


def hop(group: Group) -> float:
    """Seconds for one message of a ring, including all that our ring does for it. Collective."""
    from hpc_train.collectives.coroutines import drive
    from hpc_train.collectives.ring import Ring

    ring, tiny = Ring(group), torch.zeros(group.size)
    taken = []
    for _ in range(HOPS):
        begin = time.perf_counter()
        drive(ring.sum_(tiny, 0))
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) / (2 * (group.size - 1))


def measure(options: argparse.Namespace) -> None:
    """Measure on each rank."""
    from hpc_train.mpi import runtime as runtimes

    torch.set_num_threads(1)
    runtime = runtimes.start_runtime()
    group, ranks = runtime.world, runtime.world.size
    found = [turns(Trial(group, SHAPE["hidden"], SAMPLES, STEPS[ranks]), options.rounds)]
    if ranks == SIZES_RANKS:
        found += [turns(Trial(group, hidden, 1, SIZES_STEPS), options.rounds) for hidden in SIZES]
    seconds = hop(group) if ranks == 2 else None
    if group.rank == 0:
        harness.hand_back(options.result, {"trials": found, "hop": seconds})
    runtime.close()


def turns(trial: Trial, rounds: int) -> tuple[int, harness.Samples]:
    """The number of a trial's parameters, and the seconds per step of its candidates."""
    candidates = {CEILING: trial.alone, MPI: partial(trial.averaged, 0)}
    candidates[ZERO] = partial(trial.averaged, 1)
    return trial.parameters, harness.in_turn(candidates, rounds, warmup=0)


@dataclass(frozen=True)
class Point:
    """The measured time that averaging takes of one core in a step.

    Args:
        ranks: number of ranks of the node.
        parameters: number of parameters of the model.
        seconds: the median over the rounds.
        error: the error of that median in seconds, from the scatter of the rounds.
    """

    ranks: int
    parameters: float
    seconds: float
    error: float


@dataclass(frozen=True)
class Fit:
    """A fit of the time that averaging inside a node takes of one core, in seconds per step.

    Args:
        fixed: the part that depends on nothing.
        per_parameter: the time for each parameter.
        per_rank: the time for each rank of the node.
    """

    fixed: float
    per_parameter: float
    per_rank: float

    @classmethod
    def of(cls, points: list[Point]) -> Fit:
        """Fit by least squares, weighted by the points' errors. No constant is below zero."""
        rows = np.array([[1.0, point.parameters, point.ranks] for point in points])
        times = np.array([point.seconds for point in points])
        # The model is only good to a tenth, so no point counts as more exact than that.
        weights = 1 / np.array([max(point.error, 0.1 * abs(point.seconds)) for point in points])
        scale = rows.max(axis=0)
        rows, times = rows / scale * weights[:, None], times * weights
        best, least = np.zeros(3), math.inf
        for used in itertools.product((False, True), repeat=3):
            found = np.zeros(3)
            found[list(used)] = np.linalg.lstsq(rows[:, list(used)], times, rcond=None)[0]
            error = float(((rows @ found - times) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = found, error
        return cls(*(best / scale).tolist())

    def seconds(self, ranks: int, parameters: float) -> float:
        """The fitted time of one core in a node of `ranks` ranks."""
        return self.fixed + self.per_parameter * parameters + self.per_rank * ranks


def across(nodes: int, nbytes: float, gbit: float, latency: float) -> float:
    """Seconds for the sum over nodes, by our ring or by a tree of the MPI library."""
    transfer = 2 * (nodes - 1) / nodes * nbytes / (gbit / 8 * 1e9)
    return transfer + min(2 * (nodes - 1), 2 * math.ceil(math.log2(nodes))) * latency


def exposed(nodes: int, nbytes: float, gbit: float, latency: float, step: float) -> float:
    """The part of `across` that the backward pass cannot hide, in seconds."""
    last = across(nodes, min(nbytes, LAST_BUCKET), gbit, latency)
    return max(last, across(nodes, nbytes, gbit, latency) - BACKWARD * step)


def costs(found: Mapping[int, list[tuple[int, harness.Samples]]]) -> list[Point]:
    """The time that each trial's averaging takes of one core: its cost times the cores per rank."""
    cores = len(os.sched_getaffinity(0))
    points = []
    for ranks, trials in found.items():
        share = min(cores, ranks) / ranks
        for parameters, samples in trials:
            if ranks > 1:
                pairs = zip(samples[MPI], samples[CEILING], strict=True)
                taken = [share * (mine - theirs) for mine, theirs in pairs]
                error = statistics.stdev(taken) / math.sqrt(len(taken))
                points.append(Point(ranks, parameters, statistics.median(taken), error))
    return points


def show_fit(fit: Fit, points: list[Point]) -> None:
    """Print the measured times beside the fitted ones."""
    table = Table("ranks", "parameters", "measured ms", "fitted ms", title="of one core per step")
    for point in points:
        fitted = 1e3 * fit.seconds(point.ranks, point.parameters)
        measured = f"{1e3 * point.seconds:.2f} +- {1e3 * point.error:.2f}"
        table.add_row(
            str(point.ranks), f"{point.parameters / 1e6:.1f} M", measured, f"{fitted:.2f}"
        )
    Console(width=100).print(table)
    print(
        f"inside a node, of one core: {1e3 * fit.fixed:.3f} ms"
        f" + {1e9 * fit.per_parameter:.3f} ns x parameters"
        f" + {1e6 * fit.per_rank:.1f} us x ranks"
    )


def extrapolate(fit: Fit, latency: float, parameters: int, step: float) -> dict[str, float]:
    """Print a table for a large machine. Returns the efficiencies at its largest size.

    Args:
        fit: the fit of the work inside a node.
        latency: seconds for one message between nodes.
        parameters: number of parameters of the measured model.
        step: seconds of its step without communication; larger models take longer in proportion.
    """
    titles = [
        f"{what}, {gbit} Gbit/s" for gbit in NETWORK_GBIT for what in ("across ms", "worst", "best")
    ]
    table = Table("parameters", "ranks", "step ms", "inside ms", *titles)
    found = {}
    rows = [(float(parameters), nodes) for nodes in NODES]
    for size, nodes in rows + [(size, NODES[-1]) for size in LARGER]:
        alone, inside = step * size / parameters, fit.seconds(NODE_RANKS, size)
        cells = [f"{size / 1e6:.0f} M", str(nodes * NODE_RANKS)]
        cells += [f"{1e3 * alone:.1f}", f"{1e3 * inside:.2f}"]
        for gbit in NETWORK_GBIT:
            link = (nodes, 4 * size, gbit, latency)
            wire, visible = (across(*link), exposed(*link, alone)) if nodes > 1 else (0.0, 0.0)
            bounds = [alone / (alone + inside + more) for more in (wire, visible)]
            cells += [f"{1e3 * wire:.2f}", *(f"{bound:.3f}" for bound in bounds)]
            key = f"{nodes * NODE_RANKS} ranks, {size / 1e6:.0f} M, {gbit} Gbit/s"
            found |= {f"{key}, worst": bounds[0], f"{key}, best": bounds[1]} if nodes > 1 else {}
        table.add_row(*cells)
    Console(width=140).print(table)
    return {key: value for key, value in found.items() if key.startswith("1024")}


def report(found: Mapping[int, list[tuple[int, harness.Samples]]]) -> tuple[dict, dict]:
    """Print every trial. Returns the ratios and medians."""
    ratios, middles = {}, {}
    for ranks, trials in found.items():
        for number, (parameters, samples) in enumerate(trials):
            tokens = f"{1 if number else SAMPLES} x 128 tokens"
            key = f"{ranks} ranks, {parameters / 1e6:.1f} M parameters, {tokens}"
            harness.show(key, "s", samples, CEILING)
            names = [name for name in samples if name != CEILING]
            ratios |= {f"{key}: {n}": harness.paired_ratio(samples, CEILING, n) for n in names}
            middles |= {f"{key}: {n}": value for n, value in harness.medians(samples).items()}
    return ratios, middles


def main() -> None:
    """Start the ranks, report, fit and extrapolate."""
    options = harness.arguments("step time with 1 to 32 ranks", most=32, rounds=0)
    if options.result:
        measure(options)
        return
    found, latency = {}, NETWORK_LATENCY
    for ranks in STEPS:
        if ranks > options.most or not harness.memory_for(ranks, RANK_MIB):
            break
        rounds = str(options.rounds or ROUNDS[ranks])
        handed = harness.on_ranks(ranks, f"benchmarks.{NAME}", "--rounds", rounds)
        found[ranks] = handed["trials"]
        latency += handed["hop"] or 0.0
    ratios, middles = report(found)
    points = costs(found)
    fit = Fit.of(points)
    show_fit(fit, points)
    print(f"one message of a ring: {1e6 * latency:.1f} us, including the assumed network latency")
    parameters, samples = found[1][0]
    ratios |= extrapolate(fit, latency, parameters, harness.medians(samples)[CEILING])
    middles |= {
        "fit, seconds": fit.fixed,
        "fit, seconds per parameter": fit.per_parameter,
        "fit, seconds per rank": fit.per_rank,
        "fit, seconds per message": latency,
    }
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
