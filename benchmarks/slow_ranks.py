"""Whether a slow rank is named with the right cause, and what looking for it costs.

    python -m benchmarks.slow_ranks [--cases 8] [--quiet 10] [--rounds 40] [--steps 50]

- cost: a job of two ranks whose steps alternate in blocks between looking for slow ranks and not.
- injected cases, `--cases` of each kind. On two ranks bound to a core each: load (a process spins
  on a rank's core), compute (a rank multiplies more matrices), memory (a rank gets new pages of
  memory, or gives pages back and gets them again). On four emulated hosts of one rank: data (a data
  set that sleeps, or a file that is read slowly), network (the link of a host is shaped). A case is
  right if the first rank that the job names, and its cause, are those.
- undisturbed runs, half of them on each: a rank that is named there is a false alarm. Other
  programs on the machine cause true ones, so nothing else may run.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hpc_train
from benchmarks import harness
from hpc_train.config.file import load
from hpc_train.host.pages import give_back
from hpc_train.mpi import phases
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

NAME = "slow_ranks"
CORES, HOSTS = 2, 4  # ranks
MBIT = 800
EVERY = 10  # steps of a record
ON_CORES, ON_HOSTS = ("load", "compute", "memory"), ("data", "network")
WIDTH, SAMPLES = 512, 256  # of the model, and samples of a rank in a step
SPARE = 9  # passes through the model in which nothing is learned, so that steps take longer
BLOCKS = "blocks"
SPIN = """
import mmap, os, sys, time
core, path = int(sys.argv[1]), sys.argv[2]
os.sched_setaffinity(0, {core})
with open(path, "r+b") as file:
    told = mmap.mmap(file.fileno(), 256)
while os.getppid() == int(sys.argv[3]):
    share = told[core] / 100
    until = time.perf_counter() + 0.02 * share
    while time.perf_counter() < until:
        pass
    time.sleep(0.02 * (1 - share) if share else 0.005)
"""


class Injected(NamedTuple):
    """What makes a rank slow: kind, rank, one of two ways, and how much, from 0 to 3."""

    kind: str
    rank: int = -1
    way: int = 0
    much: int = 0


class SlowFile:
    """A file of samples whose reads take longer."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._file, self._seconds = path.open("rb", buffering=0), seconds

    def read(self, begin: int, nbytes: int) -> bytearray:
        """Read bytes from a place on."""
        time.sleep(self._seconds)
        self._file.seek(begin)
        return bytearray(self._file.read(nbytes))


class Samples:
    """Samples from a file, all of a micro-batch at once."""

    row = 4 * 64

    def __init__(self, path: Path, sleeps: float, reads: float) -> None:
        self.sleeps, self.file = sleeps, SlowFile(path, reads)

    def __len__(self) -> int:
        return 1 << 14

    def fetch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """A batch of samples, one behind the other in the file."""
        time.sleep(self.sleeps)
        read = self.file.read(int(indices[0]) % 1024 * self.row, len(indices) * self.row)
        numbers = torch.frombuffer(read, dtype=torch.float32).view(len(indices), 64)
        return numbers, numbers.sum(1, keepdim=True)


class Disturbed:
    """A job's rank, and what disturbs it in a case."""

    def __init__(self, runtime: Runtime, folder: Path, told: str) -> None:
        self.runtime, self.folder = runtime, folder
        self.told = None
        if told:
            with Path(told).open("r+b") as file:
                self.told = mmap.mmap(file.fileno(), 256)
        if runtime.world.rank == 0:
            generator = torch.Generator().manual_seed(1)
            rows = torch.randn(2048, 64, generator=generator)
            (folder / "rows").write_bytes(rows.numpy().tobytes())
        runtime.world.barrier()
        self.step = 0.05  # seconds of an undisturbed one; measured by the first run

    def task(self, case: Injected) -> TrainingTask:
        """The task of a case, on this rank."""
        mine = case.rank == self.runtime.world.rank
        seconds = self.step * (0.4, 0.6, 1.0, 1.5)[case.much] if mine else 0.0
        late = seconds if case.kind == "data" else 0.0
        data = Samples(self.folder / "rows", *((late, 0.0) if case.way == 0 else (0.0, late)))
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )
        more = {"compute": _multiply, "memory": (_new_pages, _same_pages)[case.way]}
        extra = more.get(case.kind, _nothing) if mine else _nothing

        def loss(module: nn.Module, batch: Any) -> Tensor:
            extra(seconds)
            with torch.no_grad():
                for _ in range(SPARE if self.told is not None else SPARE // 3):
                    module(batch[0])
            return nn.functional.mse_loss(module(batch[0]), batch[1])

        return TrainingTask(model, data, loss)

    @contextlib.contextmanager
    def around(self, case: Injected) -> Iterator[None]:
        """Disturb this rank from outside, if the case is of that kind."""
        mine = case.rank == self.runtime.world.rank
        (core, *_) = os.sched_getaffinity(0)
        if mine and case.kind == "load":
            assert self.told is not None
            self.told[core] = (60, 75, 90, 100)[case.much]
        if mine and case.kind == "network":
            _shape((160, 120, 80, 60)[case.much])
        self.runtime.world.barrier()
        try:
            yield
        finally:
            if mine and case.kind == "load":
                self.told[core] = 0
            if mine and case.kind == "network":
                _shape(MBIT)

    def run(self, case: Injected, steps: int) -> dict[str, Any]:
        """Train, and return what the job says of slow ranks. Collective."""
        world = self.runtime.world
        directory = world.from_first(lambda: tempfile.mkdtemp(dir=self.folder))
        words = ["--run.dir", directory, "--run.steps", str(steps), "--run.log_every", str(EVERY)]
        words += ["--data.batch", str(SAMPLES * world.size), "--optimizer.lr", "1e-5"]
        words += ["--checkpoint.every", "0", "--checkpoint.verify", "false"]
        words += ["--run.preflight", "false", "--data.prefetch", "0", "--memory.zero", "0"]
        config = load(None, words)
        with self.around(case), Trainer(config, self.task(case), self.runtime) as trainer:
            trainer.shown = False
            trainer.train()
        if world.rank:
            return {}
        records, events = (
            [
                json.loads(line)
                for line in Path(directory, name).read_text(encoding="utf-8").splitlines()
            ]
            for name in ("metrics.jsonl", "events.jsonl")
        )
        named = [event for event in events if event["event"] == "slow"]
        step = statistics.median(record["step_seconds"] for record in records[1:])
        return {"case": case, "named": named, "step": step}


def _nothing(seconds: float) -> None:
    pass


def _multiply(seconds: float) -> None:
    """Work of the calling thread that takes so long on a processor of its own."""
    one = torch.ones(128, 128)
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        one @ one


def _new_pages(seconds: float) -> None:
    """Get new pages of memory."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        with contextlib.closing(mmap.mmap(-1, 1 << 20)) as pages:
            for begin in range(0, 1 << 20, mmap.PAGESIZE):
                pages[begin] = 1


def _same_pages(seconds: float) -> None:
    """Give pages of a tensor back to the system, and write them again."""
    kept = torch.empty(1 << 20)
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        kept.fill_(1.0)
        give_back(kept.data_ptr(), kept.nbytes, shared=False)


def _shape(mbit: int) -> None:
    """Give what this host sends another bandwidth."""
    words = f"tc qdisc change dev eth0 root tbf rate {mbit}mbit burst 128kb latency 50ms"
    subprocess.run(words.split(), check=True)


def cases(kinds: tuple[str, ...], ranks: int, each: int, quiet: int) -> list[Injected]:
    """The cases of these kinds, in an order that mixes them, with undisturbed runs between."""
    made = [
        Injected(kind, (number + place) % ranks, number % 2, number // 2 % 4)
        for place, kind in enumerate(kinds)
        for number in range(each)
    ]
    made += [Injected("none")] * quiet
    Random(len(kinds)).shuffle(made)
    return made


def measure_cases(options: Any, runtime: Runtime) -> None:
    """Run all cases of one place. Collective."""
    kinds = ON_CORES if options.told else ON_HOSTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(runtime.world.from_first(lambda: name))
        rank = Disturbed(runtime, folder, options.told)
        step = rank.run(Injected("none"), 3 * EVERY).get("step", 0.0)
        rank.step = runtime.world.from_first(lambda: step)
        found = []
        for case in cases(kinds, runtime.world.size, options.cases, options.quiet):
            done = rank.run(case, options.steps)
            found.append(done)
            if done:
                print(told(done), file=sys.stderr, flush=True)
        runtime.world.barrier()
    if runtime.world.rank == 0:
        harness.hand_back(options.result, found)


def measure_cost(options: Any, runtime: Runtime) -> None:
    """Time blocks of steps with and without a look for slow ranks, in turn. Collective."""
    world = runtime.world
    with tempfile.TemporaryDirectory() as name:
        folder = Path(world.from_first(lambda: name))
        rank = Disturbed(runtime, folder, options.told)
        steps = str(2 * EVERY * (options.rounds + 1))
        words = ["--run.dir", str(folder / "run"), "--run.steps", steps, "--run.preflight", "false"]
        words += ["--data.batch", str(SAMPLES * world.size), "--checkpoint.every", "0"]
        words += ["--run.log_every", str(EVERY)]
        with Trainer(load(None, words), rank.task(Injected("none")), runtime) as trainer:
            trainer.shown = False
            samples = _alternating(trainer, world.waiting.phases)
            trainer.train()
        world.barrier()
    if world.rank == 0:
        harness.hand_back(options.result, samples)


def _alternating(trainer: Trainer, watched: phases.StepPhases) -> dict[str, list[float]]:
    """Let every other block of a training look for slow ranks. Returns the blocks' times so far."""
    samples: dict[str, list[float]] = {"without": [], "with": [], "inside": []}
    records = trainer.step_records
    real, inside, calls = records._slow, [0.0], [0]
    clock = SimpleNamespace(perf_counter=time.perf_counter)

    def timed(method: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            begin = time.thread_time()
            result = method()
            inside[0] += time.thread_time() - begin
            return result

        return call

    def used() -> float:
        calls[0] += 1
        return time.thread_time()

    nothing = SimpleNamespace(
        start=real.start, count_step=lambda: None, take=lambda: None, named=None
    )
    seen = SimpleNamespace(
        start=real.start, count_step=timed(real.count_step), take=timed(real.take), named=None
    )
    began = [0.0, 0]

    measured = records.measured

    def block(step: int) -> Any:
        record = measured(step)
        if step >= EVERY and step % EVERY == 0:
            now, number = time.perf_counter(), step // EVERY
            if number > 2:
                kind = "with" if records._slow is seen else "without"
                samples[kind].append((now - began[0]) / EVERY)
                if kind == "with":
                    cost = inside[0] + calls[0] * clock.price
                    samples["inside"].append(cost / EVERY)
            looks = number % 2 == 0
            records._slow = seen if looks else nothing
            if looks:
                real.start()
            clock.thread_time = used if looks else (lambda: 0.0)
            phases.time = clock
            inside[0], calls[0], began[0] = 0.0, 0, time.perf_counter()
        return record

    begin = time.perf_counter()
    for _ in range(1000):
        time.thread_time()
    clock.price = (time.perf_counter() - begin) / 1000
    clock.thread_time = time.thread_time
    records.measured = block
    return samples


def told(done: dict[str, Any]) -> str:
    """One line about a case."""
    case = Injected(*done["case"])
    first = done["named"][0] if done["named"] else None
    says = f"rank {first['rank']}, {first['cause']}: {first['why']}" if first else "nobody"
    return f"{'ok ' if right(done) else 'BAD'} {tuple(case)}, {done['step']:.3f} s: {says}"


def right(done: dict[str, Any]) -> bool:
    """Whether a job has named the rank and the cause that there were."""
    case, named = Injected(*done["case"]), done["named"]
    if case.kind == "none":
        return not named
    return bool(named) and (named[0]["rank"], named[0]["cause"]) == (case.rank, case.kind)


@contextlib.contextmanager
def spinning() -> Iterator[str]:
    """Processes that spin on each core when a file says so; yields its name."""
    with tempfile.NamedTemporaryFile() as file, contextlib.ExitStack() as stack:
        file.write(bytes(256))
        file.flush()
        for core in os.sched_getaffinity(0):
            words = [sys.executable, "-c", SPIN, str(core), file.name, str(os.getpid())]
            stack.callback(stack.enter_context(subprocess.Popen(words)).terminate)
        yield file.name


def summed(found: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Print how many cases of each kind were right. Returns the shares and the numbers."""
    table = Table("kind", "right", "of", title="injected slow ranks, and undisturbed runs")
    ratios, middles = {}, {}
    for kind in (*ON_CORES, *ON_HOSTS, "none"):
        these = [done for done in found if done["case"][0] == kind]
        if these:
            good = sum(right(done) for done in these)
            table.add_row(kind, str(good), str(len(these)))
            ratios[f"right, {kind}"] = good / len(these)
            middles[f"right, {kind}"] = good
    for done in found:
        if not right(done):
            print(told(done), file=sys.stderr)
    injected = [done for done in found if done["case"][0] != "none"]
    middles["right, all injected"] = sum(right(done) for done in injected)
    middles["injected"] = len(injected)
    Console(width=100).print(table)
    return ratios, middles


def cost(options: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Print what looking for slow ranks costs. Returns ratios and medians."""
    with spinning() as file:  # which rest
        words = ["--rounds", str(options.rounds), "--part", BLOCKS, "--told", file]
        samples = harness.on_ranks(CORES, f"benchmarks.{NAME}", *words)
    count = min(map(len, samples.values()))
    samples = {name: values[-count:] for name, values in samples.items()}
    harness.show("a step", "s", samples, "without")
    ratios = {"with / without": harness.paired_ratio(samples, "with", "without")}
    ratios["time inside / step"] = harness.paired_ratio(samples, "inside", "with")
    return ratios, harness.medians(samples)


def main() -> None:
    """Measure the cost, then all cases."""
    parser = harness.parser("slow ranks", cases=8, quiet=10, rounds=40, steps=50)
    parser.add_argument("--part", default="", help="cost, cores or hosts; without it all")
    parser.add_argument("--told", default="", help="a file that says which cores are used")
    options = parser.parse_args()
    if options.result:
        work = measure_cost if options.part == BLOCKS else measure_cases
        hpc_train.run(lambda runtime: work(options, runtime))
        return
    words = ["--cases", str(options.cases), "--steps", str(options.steps)]
    ratios, middles, found = {}, {}, []
    if options.part in ("", "cost"):
        ratios, middles = cost(options)
    if options.part in ("", "cores"):
        with spinning() as file:
            more = [*words, "--quiet", str(options.quiet // 2), "--told", file]
            found += harness.on_ranks(CORES, f"benchmarks.{NAME}", *more)
    if options.part in ("", "hosts"):
        more = [*words, "--quiet", str(options.quiet - options.quiet // 2)]
        with harness.emulated_hosts(HOSTS, 1, MBIT) as cluster:
            found += harness.on_hosts(cluster, "slot", f"benchmarks.{NAME}", *more)
    if found:
        more_ratios, more_middles = summed(found)
        ratios, middles = ratios | more_ratios, middles | more_middles
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
