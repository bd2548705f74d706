"""The memory of a training, beside its formulas, and the time and bytes that ZeRO costs.

    python -m benchmarks.memory [--states 1] [--crossed 1] [--activations 3] [--rounds 5]
        [--mbit 800]

It needs root, iproute2 and Open MPI 4, as benchmarks.two_level does.

*States*: parameters, gradients and the moments of Adam of a GPT of 25 million parameters, on two
and four emulated hosts. Each way to divide them has processes of its own. What they take is the
proportional share of resident memory (Linux's PSS) while a block in the middle computes, less what
the process took before the model was made. Beside it is what `hpc_train.planning.state` predicts,
with half of the activations of 16 tokens. Numbers are for a node, all of whose ranks are added up.

*Crossed*: the same with 16 samples, for stages 0 to 3 and each way to recompute. The prediction has
the activations that the first half of the model keeps.

*Activations*: a forward and a backward pass of one process with 24 samples, as the difference to 8
samples, which does not contain what does not depend on the micro-batch. The first number is the
peak of all tensors together, as torch's profiler counts them; the second is the prediction of
`hpc-train plan`. The others are the peak of resident memory with the gaps that the C library leaves
between tensors, and without them (`close_gaps`), and what a pass with 24 samples takes without
gaps, divided by what it takes with them: medians of --activations rounds.

*Links*: a step of 4 hosts with 2 ranks each, on links of --mbit Mbit/s, and the bytes that leave a
host, counted at its interfaces. FSDP2 is torch's `fully_shard` over gloo, with a shard for each
block. Its memory is counted as that of the states.

--states 0, --crossed 0, --activations 0 and --rounds 0 leave out a part.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks import harness
from hpc_train.config.file import load
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.host.allocator import close_gaps, keep_freed_memory, return_freed_memory
from hpc_train.host.memory import PeakMemory
from hpc_train.models import GPT
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.parallel.recompute import recompute
from hpc_train.parallel.schedule import build
from hpc_train.parallel.stages import gates_of
from hpc_train.planning.model import shape_of
from hpc_train.planning.schedules import memory
from hpc_train.planning.state import Dividing, state_bytes

MB = 1e6
HOSTS, SLOTS = 4, 2
STATES = {"vocab": 256, "sequence": 16, "layers": 8, "hidden": 512, "heads": 8}
PLACES = ((2, 1), (2, 2), (4, 2))  # hosts, and ranks on each
CROSSED = ("0 all", "1 all", "2 all", "3 all")
CROSSED_SAMPLES = 16
WAYS = ("0 all", "1 node", "1 all", "2 node", "2 all", "3 all")  # zero and scope
DEEP = {"vocab": 256, "sequence": 256, "layers": 12, "hidden": 256, "heads": 4}
SAMPLES = (8, 24)
TIMED = 5  # passes that are timed
AGAIN = ("none", "selective", "full", "3")  # memory.recompute
TRAINED = {"vocab": 256, "sequence": 128, "layers": 6, "hidden": 384, "heads": 6}
BUCKET = 4 << 20
FSDP = "FSDP2"

Step = Callable[[], float]


def options(way: str, model: GPT) -> AveragingOptions:
    """The options of a way to divide the state."""
    zero, scope = way.split()
    return AveragingOptions(
        engine="mpi",
        bucket_bytes=BUCKET,
        zero=int(zero),
        scope=scope,  # type: ignore[arg-type]
        only_modules_read=True,
        gates=gates_of(model) if zero == "3" else (),
    )


def ours(
    way: str, levels: Levels, sizes: dict[str, int], batch: Tensor, how: str = "none"
) -> tuple[GPT, Any, Step]:
    """A model, its averager and its step. Collective."""
    torch.manual_seed(0)
    model = GPT(**sizes)  # type: ignore[arg-type]
    recompute(model, how)  # type: ignore[arg-type]
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    averager = average_gradients(model, optimizer, levels, options(way, model))

    def step() -> float:
        averager.zero_grad()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        averager.average()
        averager.step()
        return float(loss.detach())

    return model, averager, step


def fsdp(group: Group, sizes: dict[str, int], batch: Tensor) -> tuple[GPT, Step]:
    """A model that torch's FSDP2 has sharded over all ranks, and its step. Collective."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    assert group.comm is not None
    if not distributed.is_initialized():
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        host, port = group.comm.bcast((group.host, port))
        distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{socket.gethostbyname(host)}:{port}",
            rank=group.rank,
            world_size=group.size,
        )
    torch.manual_seed(0)
    model = GPT(**sizes)  # type: ignore[arg-type]
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return model, step


def text(group: Group, samples: int, sizes: dict[str, int]) -> Tensor:
    """This rank's tokens, of shape (samples, sequence + 1)."""
    generator = torch.Generator().manual_seed(group.rank)
    return torch.randint(sizes["vocab"], (samples, sizes["sequence"] + 1), generator=generator)


# States.


def measure_state(way: str, how: str = "none", samples: int = 1) -> float:
    """MB that the ranks of the first host take for the state. Collective.

    Args:
        way: zero and scope, or FSDP.
        how: the value of memory.recompute.
        samples: samples of each rank, whose activations the first half of the model keeps.
    """
    job = runtime.start_runtime()
    torch.set_num_threads(1)
    levels = Levels.of(job.world)
    batch = text(job.world, samples, STATES)
    run = fsdp if way == FSDP else None
    # Another such model first, so that what libraries take is not counted: MPI keeps buffers.
    if run is None:
        _, averager, step = ours(way, levels, STATES, batch, how)
        step()
        averager.close()
        del averager, step
    else:
        run(job.world, STATES, batch)[1]()
    before = resident(job.world)
    if run is None:
        model, averager, step = ours(way, levels, STATES, batch, how)
    else:
        model, step = run(job.world, STATES, batch)
    step()
    step()
    taken: list[int] = []

    def look(*_: Any) -> None:
        if taken:  # the block is computed again
            return
        if run is None:
            averager.progress.finish()
        taken.append(resident(job.world) - before)

    model.blocks[len(model.blocks) // 2].mlp.register_forward_hook(look)
    step()
    found = sum(levels.node.gathered(taken[0])) / MB
    if run is None:
        averager.close()  # ends the gathers that go on behind the step
    else:
        torch.distributed.destroy_process_group()
    job.close()
    return found


def resident(group: Group) -> int:
    """Bytes of this process, without those that the C library could give back. Collective."""
    gc.collect()
    return_freed_memory()
    group.barrier()
    found = psutil.Process().memory_full_info().pss
    group.barrier()
    return found


def predicted_crossed(way: str, how: str, slots: int, hosts: int) -> float:
    """MB of a node by the formulas, with what the first half of the model keeps."""
    config = load(None, model_options(STATES))
    shape = shape_of(config.model, STATES["vocab"])
    kept = shape.kept(shape.parts(), how)[: 2 + STATES["layers"] // 2]
    return predicted_state(way, hosts, slots, 4 * sum(kept) * CROSSED_SAMPLES / MB)


def predicted_state(way: str, hosts: int, slots: int, activations: float | None = None) -> float:
    """MB of a node by the formulas. Activations are MB of a rank; None: half of one sample's."""
    zero, scope = way.split()
    shape = shape_of(load(None, model_options(STATES)).model, STATES["vocab"])
    stages = [4.0 * part.parameters for part in shape.parts()]
    by = Dividing(zero=int(zero), scope=scope, nodes=hosts, ranks=slots, bucket=BUCKET)
    if activations is None:
        activations = predicted_activations("none", 1, STATES) / 2
    return slots * (state_bytes(stages, 2, by).total / MB + activations)


def report_states() -> tuple[dict[str, float], dict[str, float]]:
    """Measure all ways on all hosts, and print a table. Returns measured / predicted, and MB."""
    ratios, middles = {}, {}
    for hosts, slots in PLACES:
        print(f"states, {hosts} hosts x {slots} ranks, MB per node: measured, predicted")
        with harness.emulated_hosts(hosts, slots, 8000) as cluster:
            for way in (*WAYS, *([FSDP] if slots == SLOTS else [])):
                found = harness.on_hosts(cluster, "slot", "benchmarks.memory", "--way", way)
                key = (
                    f"states, {hosts} x {slots}, zero {way}"
                    if way != FSDP
                    else (f"states, {hosts} x {slots}, {FSDP}")
                )
                middles[key] = found
                told = ""
                if way != FSDP:
                    ratios[key] = found / predicted_state(way, hosts, slots)
                    told = f"{predicted_state(way, hosts, slots):8.1f}  {ratios[key]:.3f}"
                print(f"  {way:8} {found:8.1f} {told}", flush=True)
    return ratios, middles


def report_crossed() -> tuple[dict[str, float], dict[str, float]]:
    """Measure stages of zero with recomputation. Returns measured / predicted, and MB."""
    ratios, middles = {}, {}
    for hosts, slots in PLACES[:2]:
        print(f"crossed, {hosts} hosts x {slots} ranks, MB per node: measured, predicted")
        with harness.emulated_hosts(hosts, slots, 8000) as cluster:
            for way, how in itertools.product(CROSSED, AGAIN[:3]):
                words = ["--way", way, "--again", how, "--samples", str(CROSSED_SAMPLES)]
                found = harness.on_hosts(cluster, "slot", "benchmarks.memory", *words)
                expected = predicted_crossed(way, how, slots, hosts)
                key = f"crossed, {hosts} x {slots}, zero {way}, {how}"
                middles[key], ratios[key] = found, found / expected
                print(
                    f"  {way:8} {how:10} {found:8.1f} {expected:8.1f} {ratios[key]:.3f}", flush=True
                )
    return ratios, middles


# Activations.


def measure_peak(how: str, samples: int, *, closed: bool) -> tuple[float, float, float]:
    """A forward and a backward pass: MB of all tensors at the peak, MB resident, and ms.

    `closed` leaves no gaps between tensors.
    """
    (close_gaps if closed else keep_freed_memory)()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(**DEEP)  # type: ignore[arg-type]
    recompute(model, int(how) if how.isdigit() else how)  # type: ignore[arg-type]
    tokens = text(Group(), samples, DEEP)
    model(tokens[:1, :-1], tokens[:1, 1:]).backward()
    peak = PeakMemory()
    peak.take()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    rss = peak.take() / MB
    passes = []
    for _ in range(TIMED):
        model.zero_grad()
        begin = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        passes.append(1e3 * (time.perf_counter() - begin))
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True) as profile:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert profile.profiler is not None
    changes = (
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    return max(itertools.accumulate(changes)) / MB, rss, statistics.median(passes)


def predicted_activations(how: str, samples: int, sizes: dict[str, int] = DEEP) -> float:
    """MB of activations by `hpc-train plan`."""
    words = [*model_options(sizes), f"--memory.recompute={how}", f"--data.batch={samples}"]
    config = load(None, words)
    shape = shape_of(config.model, sizes["vocab"])
    runs = [range(len(shape.parts()))]
    (needs,) = memory(config, shape, build("1f1b", 1, 1), runs, samples)
    return needs.activations / MB


def model_options(sizes: dict[str, int]) -> list[str]:
    """The sizes of a GPT as options of the command line."""
    return [f"--model.{key}={value}" for key, value in sizes.items()]


def report_activations(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure each way to recompute, and print a table. Returns measured / predicted, and more.

    Resident memory and times are those with gaps between tensors, and without, in turn.
    """
    ratios, middles = {}, {}
    few, many = SAMPLES
    print(f"activations of {many - few} samples, MB: measured, predicted, ratio")
    print("  resident with gaps and without, ms of a pass without gaps / with")
    for how in AGAIN:
        found: dict[tuple[int, str], list[list[float]]] = {}
        for _ in range(rounds):
            for case in itertools.product(SAMPLES, ("", "closed")):
                words = [sys.executable, "-m", "benchmarks.memory", "--peak", how, *map(str, case)]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                found.setdefault(case, []).append([float(word) for word in done.stdout.split()])
        middle = {
            case: [statistics.median(values) for values in zip(*tries, strict=True)]
            for case, tries in found.items()
        }
        more = middle[many, ""][0] - middle[few, ""][0]
        gaps, none = (middle[many, one][1] - middle[few, one][1] for one in ("", "closed"))
        slower = statistics.median(
            after[2] / before[2]
            for before, after in zip(found[many, ""], found[many, "closed"], strict=True)
        )
        expected = predicted_activations(how, many) - predicted_activations(how, few)
        key = f"activations, {how}"
        ratios[key], middles[key] = more / expected, more
        ratios[f"{key}, ms without gaps"] = slower
        middles |= {f"{key}, resident with gaps": gaps, f"{key}, resident": none}
        print(f"  {how:10} {more:8.1f} {expected:8.1f}  {ratios[key]:.3f}", end="")
        print(f" {gaps:8.1f} {none:8.1f}  {slower:.3f}")
    return ratios, middles


# Links.


def sent() -> int:
    """Bytes that have left this host by its interfaces, but for the loopback."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    fields = {line.split(":")[0].strip(): line.split(":")[1].split() for line in lines}
    return sum(int(values[8]) for name, values in fields.items() if name != "lo")


def measure_links(rounds: int) -> dict[str, Any]:
    """Seconds and bytes of a step, all ways in turn. Collective."""
    job = runtime.start_runtime()
    torch.set_num_threads(1)
    levels, batch = Levels.of(job.world), text(job.world, 2, TRAINED)
    ways = {f"zero {way}": ours(way, levels, TRAINED, batch) for way in WAYS}
    steps = {name: step for name, (_, _, step) in ways.items()}
    steps[FSDP] = fsdp(job.world, TRAINED, batch)[1]
    bytes_sent: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}

    def timed(name: str) -> float:
        before = sent()

        def once() -> None:
            losses[name] = steps[name]()

        seconds = harness.elapsed(job.world, once)
        bytes_sent[name].append(float(sent() - before))
        return seconds

    seconds = harness.in_turn({name: partial(timed, name) for name in steps}, rounds)
    first = losses["zero 0 all"]
    for name, loss in losses.items():
        if abs(loss - first) > 1e-3 * first:
            raise RuntimeError(f"{name} has a loss of {loss}, zero 0 one of {first}")
    for _, averager, _ in ways.values():
        averager.close()
    return {"seconds": seconds, "bytes": {k: v[-rounds:] for k, v in bytes_sent.items()}}


def report_links(rounds: int, mbit: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure on slow links, and print two tables. Returns ratios to zero 0, and medians."""
    with harness.emulated_hosts(HOSTS, SLOTS, mbit) as cluster:
        words = ["--links", str(rounds)]
        found = harness.on_hosts(cluster, "slot", "benchmarks.memory", *words)
    ratios, middles = {}, {}
    for what, unit, scale in (("seconds", "ms", 1e3), ("bytes", "MB per host", 1 / MB)):
        samples = {name: [scale * v for v in values] for name, values in found[what].items()}
        harness.show(f"a step at {mbit} Mbit/s: {what}", unit, samples, "zero 0 all")
        for name in samples:
            ratios[f"{what}, {name}"] = harness.paired_ratio(samples, name, "zero 0 all")
        middles |= {f"{what}, {n}": value for n, value in harness.medians(samples).items()}
    return ratios, middles


def main() -> None:
    """Run the parts, or one process of a part."""
    parser = argparse.ArgumentParser(description="memory, and what it costs to save it")
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    parts_given = (("states", 1), ("crossed", 1), ("activations", 3), ("rounds", 5), ("mbit", 800))
    for name, default in parts_given:
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, more in (("--result", {}), ("--way", {}), ("--peak", {"nargs": 3})):
        parser.add_argument(name, help=argparse.SUPPRESS, **more)  # type: ignore[arg-type]
    parser.add_argument("--again", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--links", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        how, samples, closed = given.peak
        print(*measure_peak(how, int(samples), closed=bool(closed)))
        return
    if given.result:
        found: Any
        if given.way:
            found = measure_state(given.way, given.again, given.samples)
        else:
            found = measure_links(given.links)
        if int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == 0:
            harness.hand_back(given.result, found)
        return
    parts = (
        (given.activations, partial(report_activations, given.activations)),
        (given.states, report_states),
        (given.crossed, report_crossed),
        (given.rounds, partial(report_links, given.rounds, given.mbit)),
    )
    harness.finish_parts("memory", parts, given.json)


if __name__ == "__main__":
    main()
