"""Compressed averaging: bytes between hosts, the time of a step over slow links, and the loss.

    python -m benchmarks.compression [--steps 500]

For bytes and times, a GPT of 11 M parameters trains with 1 x 128 tokens per rank on 4 emulated
hosts of 2 ranks, with links of 800 Mbit/s. Only messages between hosts are compressed. The averager
counts the bytes that ranks pass to MPI, and the links count the bytes that leave the hosts. Both
are sums over all hosts. All candidates take steps in turn.

For the loss, a GPT of 0.8 M parameters learns real text: Python's own modules, byte by byte. Each
of 4 ranks compresses what it sends, as 4 nodes would. All candidates start from the same weights
and see the same samples with the same learning rates. Loss is the mean of the last 25 steps,
validation the loss on held-out text.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import AdamW

from benchmarks import harness
from benchmarks.gpt_step import SHAPE
from benchmarks.gradient_averaging import build
from hpc_train.config import OptimizerSection
from hpc_train.data.prepare.portions import split_inputs
from hpc_train.data.prepare.texts import list_texts, only_texts
from hpc_train.gradients.options import AveragingOptions
from hpc_train.models import GPT
from hpc_train.mpi.group import Group
from hpc_train.training.learning_rate import learning_rate

NAME = "compression"
NONE = "none"
CANDIDATES = (NONE, "fp16", "bf16", "topk:0.01", "powersgd:4", "powersgd:16")
LEARNERS = (*CANDIDATES, "topk:0.01:300")  # the last one sends more in its first 300 steps
HOSTS, SLOTS, MBIT = 4, 2, 800
TURN = 2  # steps that a candidate takes in one turn
LINKS, LOSS = 1, 2  # the two measurements that ranks are started for
BUCKET_BYTES = {LINKS: 4 << 20, LOSS: 1 << 20}  # fixed, as PowerSGD's bytes depend on them
RANK_MIB = 1800  # memory that a rank needs

LOSS_RANKS = 4
SMALL = {"vocab": 256, "sequence": 128, "layers": 4, "hidden": 128, "heads": 4}
SAMPLES = 4  # samples per rank and step
HELD_OUT = 32  # samples per rank for the validation loss
RATE = OptimizerSection(lr=1e-3, warmup_steps=50, schedule="cosine", weight_decay=0.1)
CLIP = 1.0
LAST = 25  # number of last steps whose losses count


@dataclass
class Candidate:
    """A model with its optimizer and averager. It notes the bytes per step of each turn."""

    group: Group
    batch: tuple[Tensor, Tensor]
    compression: str
    payload: list[float] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        from hpc_train.gradients import average_gradients

        self.model, optimizer = build()
        self.averager = average_gradients(
            self.model,
            optimizer,
            self.group,
            AveragingOptions(
                engine="mpi",
                compression=self.compression,
                two_level="on",
                bucket_bytes=BUCKET_BYTES[LINKS],
            ),
        )

    def turn(self) -> float:
        """Take TURN steps and return the seconds per step."""
        harness.meet(self.group)
        before = self.averager.profile.sent, leaving()
        begin = time.perf_counter()
        for _ in range(TURN):
            self.averager.zero_grad()
            self.model(*self.batch).backward()
            self.averager.step()
        harness.meet(self.group)
        seconds = (time.perf_counter() - begin) / TURN
        after = self.averager.profile.sent, leaving()
        self.payload.append((after[0] - before[0]) / TURN)
        self.counted.append((after[1] - before[1]) / TURN)
        return seconds

    def over_all(self, node: Group) -> dict[str, float]:
        """Bytes per step over all hosts, as ranks and as links have counted them. Collective.

        Raises:
            RuntimeError: the counts contradict each other, or the ranks have different weights.
        """
        counted = statistics.median(self.counted) if node.rank == 0 else 0.0
        weights = [float(p.detach().sum()) for p in self.model.parameters()]
        mine = (set(self.payload), counted, weights)
        ranks = self.group.comm.allgather(mine)
        if any(len(steps) > 1 for steps, _, _ in ranks):
            raise RuntimeError(f"{self.compression}: not the same bytes in every step")
        payload = sum(steps.pop() for steps, _, _ in ranks)
        total = sum(counted for _, counted, _ in ranks)
        if total < payload:
            raise RuntimeError(f"{self.compression}: {payload} bytes sent, but {total} on the wire")
        if any(theirs != weights for _, _, theirs in ranks):
            raise RuntimeError(f"{self.compression}: not the same weights on all ranks")
        return {"payload": payload, "counted": total}


def leaving() -> int:
    """Bytes that have left this host so far."""
    return int(psutil.net_io_counters(pernic=True)["eth0"].bytes_sent)


def over_links(options: argparse.Namespace) -> None:
    """Measure bytes and times, on each rank of the hosts."""
    from hpc_train.mpi import runtime as runtimes

    torch.set_num_threads(1)
    runtime = runtimes.start_runtime()
    group = runtime.world
    torch.manual_seed(group.rank)
    text = torch.randint(SHAPE["vocab"], (1, SHAPE["sequence"] + 1))
    batch = (text[:, :-1], text[:, 1:])
    candidates = {name: Candidate(group, batch, name) for name in CANDIDATES}
    turns = {name: candidate.turn for name, candidate in candidates.items()}
    seconds = harness.in_turn(turns, options.rounds)
    sent = {name: candidate.over_all(runtime.node) for name, candidate in candidates.items()}
    expected = 2 * (HOSTS - 1) * sum(p.nbytes for p in candidates[NONE].model.parameters())
    if not math.isclose(sent[NONE]["payload"], expected, rel_tol=1e-5):
        raise RuntimeError(f"uncompressed {sent[NONE]['payload']} bytes, not {expected}")
    if group.rank == 0:
        harness.hand_back(options.result, {"seconds": seconds, "sent": sent})
    runtime.close()


def read_text() -> dict[str, Tensor]:
    """The standard library's modules as bytes. 5 percent are held out for validation."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = only_texts(list_texts(sorted(library.glob("*.py"))))
    return {
        split: torch.from_numpy(
            np.frombuffer(
                b"".join(
                    Path(part.file.path).read_bytes()[part.begin : part.end] for part in parts
                ),
                np.uint8,
            ).copy()
        )
        for split, parts in split_inputs(texts, 0.05).items()
    }


def samples(text: Tensor, seed: int, count: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Make a function that draws batches of `count` samples. Equal seeds give equal batches."""
    generator = torch.Generator().manual_seed(seed)
    length = SMALL["sequence"] + 1

    def draw() -> tuple[Tensor, Tensor]:
        begins = torch.randint(len(text) - length, (count,), generator=generator)
        rows = torch.stack([text[begin : begin + length] for begin in begins.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

    return draw


def train(group: Group, text: dict[str, Tensor], steps: int, compression: str) -> dict[str, float]:
    """The loss of the last steps and the validation loss. Collective."""
    from hpc_train.gradients import average_gradients

    torch.manual_seed(0)
    model = GPT(**SMALL)
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=RATE.weight_decay)
    averager = average_gradients(
        model,
        optimizer,
        group,
        AveragingOptions(
            engine="mpi", compression=compression, two_level="off", bucket_bytes=BUCKET_BYTES[LOSS]
        ),
    )
    draw, losses = samples(text["train"], group.rank, SAMPLES), []
    for step in range(1, steps + 1):
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate(RATE, step, steps, 1)
        averager.zero_grad()
        loss = model(*draw())
        loss.backward()
        averager.average()
        averager.scale_(min(1.0, CLIP / (float(averager.norm()) + 1e-6)))
        averager.step()
        losses.append(float(loss.detach()))
    averager.close()
    with torch.no_grad():
        held_out = float(model(*samples(text["validation"], group.rank, HELD_OUT)()))
    mine = {"loss": statistics.mean(losses[-LAST:]), "validation": held_out}
    everyone = group.comm.allgather(mine)
    return {key: statistics.mean(found[key] for found in everyone) for key in mine}


def learn(options: argparse.Namespace) -> None:
    """Measure losses, on each rank."""
    from hpc_train.mpi import runtime as runtimes

    torch.set_num_threads(1)
    runtime = runtimes.start_runtime()
    text = read_text()
    found = {name: train(runtime.world, text, options.steps, name) for name in LEARNERS}
    if not all(math.isfinite(loss) for losses in found.values() for loss in losses.values()):
        raise RuntimeError(f"a loss is not finite: {found}")
    if runtime.world.rank == 0:
        harness.hand_back(options.result, found)
    runtime.close()


def show(sent: dict, seconds: harness.Samples, losses: dict) -> None:
    """Print the table."""
    columns = ["", "MB sent", "MB on links", "less", "ms per step", "x none"]
    columns += ["loss", "x none", "validation", "x none"]
    table = Table(*columns, title=f"{HOSTS} hosts x {SLOTS} ranks, {MBIT} Mbit/s; per step")
    for name in LEARNERS:
        cells = link_cells(name, sent, seconds) if name in sent else [""] * 5
        for key in ("loss", "validation"):
            ratio = losses[name][key] / losses[NONE][key]
            cells += [f"{losses[name][key]:.4f}", f"{ratio:.4f}"]
        table.add_row(name, *cells)
    Console(width=120).print(table)


def link_cells(name: str, sent: dict, seconds: harness.Samples) -> list[str]:
    """The table's cells with bytes and times over the links."""
    times = [1e3 * value for value in seconds[name]]
    spread = f"{statistics.median(times):.0f} ({min(times):.0f} - {max(times):.0f})"
    cells = [f"{sent[name][key] / 1e6:.2f}" for key in ("payload", "counted")]
    cells.append(f"{sent[NONE]['payload'] / sent[name]['payload']:.1f}")
    return [*cells, spread, f"{harness.paired_ratio(seconds, name, NONE):.3f}"]


def main() -> None:
    """Start hosts and ranks, and report."""
    options = harness.arguments("compressed averaging", rounds=7, steps=500, part=0)
    if options.result:
        {LINKS: over_links, LOSS: learn}[options.part](options)
        return
    if not harness.memory_for(HOSTS * SLOTS, RANK_MIB):
        sys.exit(2)
    module = f"benchmarks.{NAME}"
    with harness.emulated_hosts(HOSTS, SLOTS, MBIT) as cluster:
        words = ["--rounds", str(options.rounds), "--part", str(LINKS)]
        links = harness.on_hosts(cluster, "slot", module, *words)
    words = ["--steps", str(options.steps), "--part", str(LOSS)]
    losses = harness.on_ranks(LOSS_RANKS, module, *words)
    sent, seconds = links["sent"], links["seconds"]
    show(sent, seconds, losses)
    ratios, middles = {}, {}
    for name in CANDIDATES:
        middles |= {f"{name}: {key} bytes": value for key, value in sent[name].items()}
        middles[f"{name}: seconds"] = statistics.median(seconds[name])
        ratios[f"{name}: bytes"] = sent[name]["payload"] / sent[NONE]["payload"]
        ratios[f"{name}: seconds"] = harness.paired_ratio(seconds, name, NONE)
    for name in LEARNERS:
        middles |= {f"{name}: {key}": value for key, value in losses[name].items()}
        ratios |= {
            f"{name}: {key}": value / losses[NONE][key] for key, value in losses[name].items()
        }
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
