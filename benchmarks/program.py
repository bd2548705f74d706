"""The whole program beside plain scripts: `hpc-train train` with default keys on two ranks.

    python -m benchmarks.program [--rounds 5] [--steps 80] [--passed 20] [--cost_steps 600]

Every candidate trains the same module, `hpc_train.models.GPT`, with 1 x 128 tokens per rank and a
fused AdamW. Each has an MPI job of its own; the jobs are started in turn. Ours is the program as a
user starts it, with its default engine and with engine horovod. Its time per step comes from
metrics.jsonl. The others are plain scripts: ranks that do not communicate, torch's
DistributedDataParallel over gloo, Horovod's DistributedOptimizer, and our model, averager and
optimizer in a bare loop. The first steps of each do not count.

In one table all candidates have the matrix products of our linear layers, in another one torch's.

The command line itself costs less than two jobs differ by chance. So its cost is measured within
one job, where a bare step of the same model and averager follows each step of the program.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from benchmarks import harness
from benchmarks.gpt_step import SHAPE
from benchmarks.gradient_averaging import (
    averager_step,
    build,
    ddp,
    plain_step,
    start_gloo,
    stock_horovod,
)
from hpc_train.config.file import load
from hpc_train.data.loader import Step as Batches
from hpc_train.data.prepare.work import prepare_text
from hpc_train.gradients.options import AveragingOptions
from hpc_train.job.program import run
from hpc_train.models import GPT, linear
from hpc_train.mpi.group import Group
from hpc_train.scaling.results import ERROR_OF_MEDIAN, QUARTILES_APART
from hpc_train.training import gpt, planned
from hpc_train.training.trainer import Trainer

RANKS = 2
LOG_EVERY = 10  # the default of run.log_every
CEILING, DDP, STOCK = "no communication", "DDP, gloo", "stock Horovod"
PROGRAM, PARTS = "ours, the program", "ours, bare parts"
HOROVOD = "ours, the program, engine horovod"
PEERS = (CEILING, DDP, STOCK, PARTS)
MATRICES = {"auto": "our matrix products", "torch": "torch's linear layers"}
CONFIG = """
model: {{layers: {layers}, hidden: {hidden}, heads: {heads}, sequence: {sequence}}}
data: {{path: {data}, batch: {batch}}}
"""

Step = Callable[[], None]


def make(peer: str, batch: tuple[Tensor, Tensor], group: Group) -> tuple[GPT, Step]:
    """Make the model and the step of a plain script."""
    if peer == DDP:
        start_gloo(group.comm)
        return ddp(batch)
    if peer == STOCK:
        import horovod.torch as hvd

        hvd.init()
        return stock_horovod(batch, hvd)
    model, optimizer = build()
    if peer == CEILING:
        return model, plain_step(model, optimizer, batch)
    from hpc_train.gradients import average_gradients

    averager = average_gradients(model, optimizer, group, AveragingOptions(zero=1))
    return model, averager_step(model, averager, batch)


def script(options: argparse.Namespace) -> None:
    """Run a plain script, on each rank.

    It returns the mean seconds of every LOG_EVERY steps, and the norm of the weights at the end.
    """
    from hpc_train.mpi import runtime as runtimes

    if options.matrices == "torch":
        linear.use("torch")
    runtime = runtimes.start_runtime()
    group = runtime.world
    torch.manual_seed(group.rank)
    text = torch.randint(SHAPE["vocab"], (1, SHAPE["sequence"] + 1))
    model, step = make(options.peer, (text[:, :-1], text[:, 1:]), group)
    found = []
    for number in range(options.steps // LOG_EVERY):
        if number * LOG_EVERY == options.passed:
            harness.meet(group)
        begin = time.perf_counter()
        for _ in range(LOG_EVERY):
            step()
        found.append((time.perf_counter() - begin) / LOG_EVERY)
    harness.meet(group)
    if group.rank == 0:
        norm = float(get_total_norm(list(model.parameters())).detach())
        harness.hand_back(options.result, {"seconds": found, "norm": norm})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    harness.meet(group)
    runtime.close()


class Alternating(Trainer):
    """A Trainer that takes a bare step after each of its own. It sums up LOG_EVERY of each."""

    own: list[float]
    bare: list[float]
    begin = 0.0

    def _train_step(self, step: Batches, report: Callable[[dict[str, float]], None]) -> None:
        super()._train_step(step, report)
        taken = time.perf_counter()
        averager_step(self.model, self.averager, step.micro_batches[0].data)()
        ended = time.perf_counter()
        if step.number % LOG_EVERY == 1:
            self.own.append(0.0)
            self.bare.append(0.0)
        self.own[-1] += taken - self.begin
        self.bare[-1] += ended - taken
        self.begin = ended


def alternate(options: argparse.Namespace) -> None:
    """Measure the steps of the program and bare steps in between, on each rank."""
    folder = Path(options.result).parent / "run"
    words = ["--run.dir", str(folder), "--run.steps", str(options.steps)]
    config = load(options.alternate, words)
    Alternating.own, Alternating.bare = [], []
    planned.Trainer = Alternating
    code = run(functools.partial(gpt.train_gpt, config))
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)) == 0:
        found = {"own": Alternating.own, "bare": Alternating.bare}
        harness.hand_back(options.result, found)
    raise SystemExit(code)


def cost(config: Path, steps: int) -> tuple[float, float]:
    """The extra time of a step of the program over a bare one, in percent.

    Returns:
        The median over sums of LOG_EVERY steps, and its standard error, estimated by quartiles.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        words = ["--alternate", str(config), "--result", str(result), "--steps", str(steps)]
        start("benchmarks.program", *words)
        found = json.loads(result.read_text(encoding="utf-8"))
    first = 2  # the first sum that counts; the first steps of the scripts do not count either
    pairs = zip(found["own"][first:], found["bare"][first:], strict=True)
    ratios = [100 * (own / bare - 1) for own, bare in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, ERROR_OF_MEDIAN * (high - low) / QUARTILES_APART / len(ratios) ** 0.5


def steady(seconds: list[float], passed: int) -> float:
    """Tokens per second of all ranks, from the mean seconds of every LOG_EVERY steps."""
    counted = seconds[passed // LOG_EVERY :]
    return RANKS * SHAPE["sequence"] / statistics.fmean(counted)


def start(*words: str) -> None:
    """Run Python on all ranks. Each has a core of its own if there are enough."""
    command = [*harness.mpirun(RANKS), sys.executable, "-m", *words]
    environ = harness.environ()
    done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")


def run_script(
    peer: str, matrices: str, options: argparse.Namespace, norms: dict[str, float]
) -> float:
    """Run a plain script to its end. Returns tokens per second.

    Raises:
        RuntimeError: its weights differ from those of another script.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        words = ["--peer", peer, "--matrices", matrices, "--result", str(result)]
        words += ["--steps", str(options.steps), "--passed", str(options.passed)]
        start("benchmarks.program", *words)
        found = json.loads(result.read_text(encoding="utf-8"))
    if peer != CEILING:
        norms[peer] = found["norm"]
    if norms and max(norms.values()) > 1.001 * min(norms.values()):
        raise RuntimeError(f"the weights differ: {norms}")
    return steady(found["seconds"], options.passed)


def run_program(config: Path, matrices: str, options: argparse.Namespace, *more: str) -> float:
    """Run `hpc-train train` with more options to its end. Returns tokens per second.

    Raises:
        RuntimeError: the losses do not make sense.
    """
    with tempfile.TemporaryDirectory() as folder:
        train = ["train", str(config), "--run.dir", folder, "--run.steps", str(options.steps)]
        start("hpc_train", *train, "--precision.matmul", matrices, *more)
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    if not 0 < records[-1]["loss"] < records[0]["loss"]:
        raise RuntimeError(f"the losses are {[record['loss'] for record in records]}")
    # The first record has only step 1. Neither it nor the second one counts.
    return steady([record["step_seconds"] for record in records[1:]], options.passed)


def table(config: Path, matrices: str, options: argparse.Namespace) -> harness.Samples:
    """Measure all candidates with one way to multiply matrices, and print a table."""
    norms: dict[str, float] = {}
    turns: dict[str, Callable[[], float]] = {
        peer: functools.partial(run_script, peer, matrices, options, norms) for peer in PEERS
    }
    turns[PROGRAM] = functools.partial(run_program, config, matrices, options)
    engine = ("--gradients.engine", "horovod")
    turns[HOROVOD] = functools.partial(run_program, config, matrices, options, *engine)
    found = harness.in_turn(turns, options.rounds, warmup=0)
    harness.show(f"{MATRICES[matrices]} in all", "tokens/s", found, CEILING)
    ratios = {peer: harness.paired_ratio(found, PROGRAM, peer) for peer in PEERS}
    for peer in (CEILING, DDP, STOCK):
        print(f"the program / {peer}: {ratios[peer]:.3f}")
    horovods = harness.paired_ratio(found, HOROVOD, STOCK)
    print(f"the program with engine horovod / {STOCK}: {horovods:.3f}")
    return found


def parsed() -> argparse.Namespace:
    """The user's options, and those with which this module starts itself on ranks."""
    parser = argparse.ArgumentParser(description="the whole program beside plain scripts")
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80, help="of each run")
    parser.add_argument("--passed", type=int, default=20, help="first steps that do not count")
    parser.add_argument(
        "--cost_steps", type=int, default=600, help="steps to measure the command line's cost"
    )
    parser.add_argument("--alternate", metavar="CONFIG", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--matrices", choices=MATRICES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure all candidates in turn and print the results."""
    options = parsed()
    torch.set_num_threads(1)
    if options.peer:
        script(options)
        return
    if options.alternate:
        alternate(options)
    ratios: dict[str, float] = {}
    middles: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        data, config = Path(folder, "data"), Path(folder, "program.yaml")
        prepare_text([Path(torch.__file__).parent / "optim"], data, shard_mb=1, validation=0.01)
        config.write_text(CONFIG.format(**SHAPE, data=data, batch=RANKS), encoding="utf-8")
        for matrices, title in MATRICES.items():
            found = table(config, matrices, options)
            ratios |= {
                f"{title}: program / {peer}": harness.paired_ratio(found, PROGRAM, peer)
                for peer in PEERS
            }
            horovods = harness.paired_ratio(found, HOROVOD, STOCK)
            ratios[f"{title}: program, engine horovod / {STOCK}"] = horovods
            middles |= {f"{title}: {name}": rate for name, rate in harness.medians(found).items()}
        percent, error = cost(config, options.cost_steps)
        print(f"cost of the command line per step: {percent:.2f} +- {error:.2f} %")
        ratios["cost of the command line, percent"] = percent
    harness.finish("program", ratios, middles, options.json)


if __name__ == "__main__":
    main()
