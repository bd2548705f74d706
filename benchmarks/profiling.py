"""What a profile costs: steps with our marks, with torch.profiler, and without either.

    python -m benchmarks.profiling [--rounds 40] [--steps 10] [--ranks 2] [--minutes 0]
        [--horovod 0]

Each rank trains the GPT of benchmarks.gpt_step by the Trainer, in one job. Its steps are dealt out
in turn, --steps at a time: without a profile, with our marks of all ranks, and with torch.profiler
on all ranks as well. The times are those of the steps alone. What a profile takes at its begin and
end is in a table of its own: comparing clocks, stopping, writing.

What one mark takes is measured by itself too, as other programs disturb that less. With the number
of marks of a step it gives a share of the step.

With --minutes each process's clock is set wrong by up to 5 s, and drifts by up to 50 ppm. After so
many minutes the times of its events are compared with the true ones.

With --horovod 1 jobs sum small tensors by Horovod, in turn without and with the variable
HOROVOD_TIMELINE=DYNAMIC, which must be set so that a timeline can be started. None is started.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import TensorDataset

from benchmarks import harness
from benchmarks.gpt_step import SHAPE
from hpc_train.config import ProfileSection
from hpc_train.config.file import load
from hpc_train.data.loader import Step
from hpc_train.job.profiling import Profiler
from hpc_train.models import GPT
from hpc_train.monitoring.trace import Marks
from hpc_train.mpi import runtime as runtimes
from hpc_train.mpi.clocks import ClockComparison, CommonTime
from hpc_train.mpi.group import Group
from hpc_train.mpi.phases import StepPhases
from hpc_train.mpi.runtime import Runtime
from hpc_train.scaling.results import ERROR_OF_MEDIAN, QUARTILES_APART
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

OFF, MARKS, TORCH = "no profile", "our marks", "our marks, torch.profiler"
WAYS = {OFF: None, MARKS: "none", TORCH: "all"}
WARM_UP = 2  # rounds that do not count; the first start of torch.profiler takes seconds
SMALL, IDLE = 20, 3.0  # tensors of a step of --horovod, and its seconds without work
OFFSET, DRIFT = 5.0, 50e-6  # the most that a clock is wrong by: seconds, seconds per second


class Measuring(Trainer):
    """A Trainer that profiles its steps in turn, a block of steps in each way."""

    block: int
    seconds: dict[str, list[float]]
    beside: dict[str, list[float]]
    current: Profiler | None = None

    def _train_step(self, step: Step, report: Any) -> None:
        number = step.number - 1
        name = list(WAYS)[number // self.block % len(WAYS)]
        ranks = WAYS[name]
        if number % self.block == 0:
            harness.meet(self.group)
            if ranks is not None:
                last = number + self.block
                section = ProfileSection(steps=f"{number + 1}-{last}", ranks=ranks)
                where = Path(self.config.run.dir)
                how = (self.group, self.runtime.node, where, number, last, section)
                begin = time.perf_counter()
                self.current = Profiler(*how)
                self.current.between(number)
                self.beside.setdefault(f"{name}: begin", []).append(time.perf_counter() - begin)
            harness.meet(self.group)
            self.begin = time.perf_counter()
        super()._train_step(step, report)
        profiler = self.current
        if step.number % self.block:
            if profiler is not None:
                profiler.between(step.number)
            return
        self.group.barrier()
        self.seconds[name].append((time.perf_counter() - self.begin) / self.block)
        if profiler is not None:
            begin = time.perf_counter()
            profiler.between(step.number)
            self.beside.setdefault(f"{name}: end", []).append(time.perf_counter() - begin)
            self.current = None


def train(job: Runtime, options: Namespace) -> dict[str, Any]:
    """Train on this rank; returns seconds of each way, and of what is beside the steps."""
    steps = (options.rounds + WARM_UP) * len(WAYS) * options.steps
    folder = job.world.from_first(tempfile.mkdtemp)
    words = ["--run.dir", folder, "--run.steps", str(steps), "--data.batch", str(job.world.size)]
    words += ["--checkpoint.every", "0", "--run.preflight", "false"]
    tokens = torch.randint(SHAPE["vocab"], (64, SHAPE["sequence"] + 1))
    samples = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    task = TrainingTask(GPT(**SHAPE), samples, lambda gpt, batch: gpt(*batch))
    Measuring.block = options.steps
    Measuring.seconds, Measuring.beside = {name: [] for name in WAYS}, {}
    Measuring.shown = False
    with Measuring(load(None, words), task, job) as trainer:
        trainer.train()
    traces = list(Path(folder, "profile").glob("*/trace.json.gz")) if not job.world.rank else []
    if job.world.rank == 0 and len(traces) != 2 * (options.rounds + WARM_UP):
        raise RuntimeError(f"there are {len(traces)} traces")
    found: dict[str, Any] = {"seconds": Measuring.seconds, "beside": Measuring.beside}
    if traces:
        found["bytes"] = statistics.median(path.stat().st_size for path in traces)
        events = json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"]
        marks = sum(event["ph"] == "X" and event["pid"] == 0 for event in events)
        found |= {"marks": marks / options.steps, "mark": one_mark()}
    return found


def one_mark() -> float:
    """Seconds that a phase takes longer if somebody listens."""
    phases, calls = StepPhases(), 20_000

    def seconds() -> float:
        begin = time.process_time()
        for _ in range(calls):
            with phases("forward"):
                pass
        return (time.process_time() - begin) / calls

    found = []
    for _ in range(15):
        phases.listener = None
        without = seconds()
        phases.listener = Marks()
        found.append(seconds() - without)
    return statistics.median(found)


def clocks(job: Runtime, minutes: float) -> dict[str, float]:
    """Set the clocks wrong; returns the largest errors in seconds. Collective."""
    world, truly = job.world, time.perf_counter
    draw = random.Random()
    mine = (draw.uniform(-OFFSET, OFFSET), draw.uniform(-DRIFT, DRIFT))
    since = world.from_first(truly)
    everyone = world.gathered(mine)

    def shown(true: float, of: tuple[float, float]) -> float:
        return true + of[0] + of[1] * (true - since)

    # Each process is a host of its own.
    comparison = ClockComparison(world, Group(waiting=world.waiting))
    time.perf_counter = lambda: shown(truly(), mine)
    begin, events = comparison.read(), []
    while truly() < since + 60 * minutes:
        events.append(truly())
        time.sleep(0.2)
    end = comparison.read()
    time.perf_counter = truly
    common, first = CommonTime(begin, end), everyone[0]
    errors = []
    for event in events:
        by_first = common(shown(event, mine))
        true = since + (by_first - since - first[0]) / (1 + first[1])
        errors.append(abs(true - event))
    comparison.close()
    found = world.gathered((max(errors), common.error))
    return {"error": max(one for one, _ in found), "bound": max(bound for _, bound in found)}


def horovod_sums(job: Runtime, steps: int, *, timeline: bool) -> dict[str, float]:
    """Sum small tensors by Horovod; returns rank 0's seconds of a step. Collective."""
    hvd = runtimes.start_horovod(job.world, timeline=timeline)
    tensors = [torch.zeros(64) for _ in range(SMALL)]

    def step() -> None:
        begun = [hvd.allreduce_async_(one, name=f"t{i}") for i, one in enumerate(tensors)]
        for handle in begun:
            hvd.synchronize(handle)

    for _ in range(20):
        step()
    used, begin = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    wall, processor = time.perf_counter() - begin, time.process_time() - used
    harness.meet(job.world)
    used, begin = time.process_time(), time.perf_counter()
    time.sleep(IDLE)
    idle = (time.process_time() - used) / (time.perf_counter() - begin)
    return {"step": wall / steps, "processor": processor / steps, "idle": idle}


def on_rank(options: Namespace) -> None:
    """Measure on this rank."""
    torch.set_num_threads(1)
    job = runtimes.start_runtime()
    torch.manual_seed(0)
    if options.horovod:
        found = horovod_sums(job, options.steps, timeline=options.timeline == 1)
    else:
        found = clocks(job, options.minutes) if options.minutes else train(job, options)
    if job.world.rank == 0:
        harness.hand_back(options.result, found)
    job.close()


def report(found: dict[str, Any], options: Namespace) -> None:
    """Print what the ranks have measured."""
    samples = {name: values[WARM_UP:] for name, values in found["seconds"].items()}
    milliseconds = {name: [1e3 * one for one in some] for name, some in samples.items()}
    harness.show(f"a step, {options.ranks} ranks", "ms", milliseconds, OFF)
    table = Table("beside the steps", "median ms", "max", title="begin and end of a profile")
    for name, values in found["beside"].items():
        counted = [1e3 * one for one in values[WARM_UP:]]
        table.add_row(name, f"{statistics.median(counted):.1f}", f"{max(counted):.1f}")
    Console(width=100).print(table)
    print(f"our trace of {options.steps} steps: {found['bytes'] / 1e3:.1f} kB")
    share = found["marks"] * found["mark"] / statistics.median(samples[OFF])
    print(
        f"{found['marks']:.0f} marks of {1e6 * found['mark']:.2f} us on rank 0 in a step: "
        f"{100 * share:.3f} % of it"
    )
    ratios = {
        f"{name} / {OFF}": harness.paired_ratio(samples, name, OFF) for name in (MARKS, TORCH)
    }
    for name, ratio in ratios.items():
        pairs = zip(samples[name.partition(" / ")[0]], samples[OFF], strict=True)
        low, _, high = statistics.quantiles([one / other for one, other in pairs], n=4)
        error = ERROR_OF_MEDIAN * (high - low) / QUARTILES_APART / len(samples[OFF]) ** 0.5
        print(f"{name}: {100 * (ratio - 1):+.2f} +- {100 * error:.2f} %")
    middles = harness.medians(samples) | {"marks per step": found["marks"], "mark": found["mark"]}
    harness.finish("profiling", ratios, middles, options.json)


def compare_horovod(options: Namespace) -> None:
    """Start jobs in turn, without and with the variable, and print what they take."""
    names = {0: "without DYNAMIC", 1: "with DYNAMIC"}
    found: dict[str, dict[str, list[float]]] = {}
    words = ["--horovod", "1", "--steps", str(options.steps), "--timeline"]
    for _ in range(options.rounds):
        for timeline, name in names.items():
            told = harness.on_ranks(options.ranks, "benchmarks.profiling", *words, str(timeline))
            for what, seconds in told.items():
                found.setdefault(what, {}).setdefault(name, []).append(1e3 * seconds)
    titles = {
        "step": f"a step of {SMALL} small sums, {options.ranks} ranks",
        "processor": "processor time of rank 0 in a step",
        "idle": "processor time of rank 0 in a second without work",
    }
    ratios, middles = {}, {}
    for what, title in titles.items():
        harness.show(title, "ms", found[what], names[0])
        ratios[what] = harness.paired_ratio(found[what], names[1], names[0])
        middles |= {f"{what}, {name}": one for name, one in harness.medians(found[what]).items()}
    harness.finish("profiling", ratios, middles, options.json)


def main() -> None:
    """Measure all ways in turn, or with --minutes the clocks, with --horovod its variable."""
    options = harness.arguments(
        "what a profile costs", rounds=40, steps=10, ranks=2, minutes=0, horovod=0, timeline=0
    )
    if options.result:
        on_rank(options)
        return
    if options.horovod:
        compare_horovod(options)
        return
    given = [(name, getattr(options, name)) for name in ("rounds", "steps", "ranks", "minutes")]
    words = [word for name, value in given for word in (f"--{name}", str(value))]
    found = harness.on_ranks(options.ranks, "benchmarks.profiling", *words)
    if not options.minutes:
        report(found, options)
        return
    wrong, bound = 1e6 * found["error"], 1e6 * found["bound"]
    print(f"after {options.minutes} minutes events are wrong by {wrong:.1f} us at most")
    print(f"the comparison of the clocks says {bound:.1f} us at most")
    if wrong > 1000:
        print("that is more than a millisecond", file=sys.stderr)
        sys.exit(1)
    harness.finish("profiling", {}, {"error_us": wrong, "bound_us": bound}, options.json)


if __name__ == "__main__":
    main()
