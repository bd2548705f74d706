"""One rank's training step: our GPT and Trainer parts beside a minimal GPT in plain PyTorch.

    python -m benchmarks.gpt_step

All have the same shape, the same data, a fused AdamW and one thread. Light is 1 x 128 tokens per
step, heavy 8 x 128. Ours runs three times: with the choice of the table of `host.processor` for
float32 matrices, with torch's own linear layers, and with oneDNN. The choice is one of the other
two, and these equal candidates show how much the figures vary. The ratio of torch and oneDNN is the
value for the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.reference_gpt import ReferenceGPT
from hpc_train.config import OptimizerSection
from hpc_train.gradients import average_gradients
from hpc_train.host.processor import Way
from hpc_train.models import GPT, linear
from hpc_train.mpi.group import Group
from hpc_train.training.optimizers import build_optimizer

SHAPE = {"vocab": 256, "sequence": 128, "layers": 6, "hidden": 384, "heads": 6}
LOADS = {"light": 1, "heavy": 8}


def timed(step: Callable[[], float], tokens: int, steps: int) -> Callable[[], float]:
    """Make a function that measures tokens per second. It fails if the loss is not finite."""

    def measure() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step()
        seconds = time.perf_counter() - begin
        if not 0 < loss < 10:
            raise RuntimeError(f"the loss is {loss}")
        return tokens * steps / seconds

    return measure


def reference(batch: tuple[Tensor, Tensor]) -> Callable[[], float]:
    """The training step of a minimal loop."""
    torch.manual_seed(0)
    model = ReferenceGPT(**SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def ours(batch: tuple[Tensor, Tensor], way: Way) -> Callable[[], float]:
    """The training step of ours: model, optimizer and averager as the Trainer uses them."""
    torch.manual_seed(0)
    model = GPT(**SHAPE)
    optimizer = build_optimizer(model, OptimizerSection(weight_decay=0.1))
    averager = average_gradients(model, optimizer, Group())

    def step() -> float:
        linear.use(way)
        averager.zero_grad()
        loss = model(*batch)
        loss.backward()
        averager.average()
        averager.step()
        return float(loss.detach())

    return step


def main() -> None:
    """Run both loads."""
    options = harness.arguments("training step of one rank", rounds=15)
    torch.set_num_threads(1)
    choice = linear.of_table()
    print(f"the table: {choice.way} ({choice.why})")
    ways: dict[str, Way] = {"ours": choice.way, "ours, torch": "torch"}
    if linear.onednn_works():
        ways["ours, onednn"] = "onednn"
    ratios, middles = {}, {}
    for load, samples_per_step in LOADS.items():
        torch.manual_seed(1)
        text = torch.randint(SHAPE["vocab"], (samples_per_step, SHAPE["sequence"] + 1))
        batch = (text[:, :-1], text[:, 1:])
        tokens, steps = batch[0].numel(), 16 // samples_per_step
        candidates = {
            **{name: timed(ours(batch, way), tokens, steps) for name, way in ways.items()},
            "minimal GPT": timed(reference(batch), tokens, steps),
        }
        found = harness.in_turn(candidates, options.rounds)
        harness.show(f"{load}: {samples_per_step} x 128 tokens", "tokens/s", found, "minimal GPT")
        for name in ways:
            ratios[f"{load} {name}"] = harness.paired_ratio(found, name, "minimal GPT")
        middles |= {f"{load} {name}": value for name, value in harness.medians(found).items()}
    harness.finish("gpt_step", ratios, middles, options.json)


if __name__ == "__main__":
    main()
