"""Loops of one's own on GPUs, for benchmarks.gpu: their parameters are those of one process.

    mpirun -np 2 python -m benchmarks.gpu_own_loop

The model has tied, frozen, unused, empty and scalar parameters. The last line of rank 0 is JSON:
for each way to average, the largest difference to a loop in one process on a processor; whether MPI
reads GPU memory; and how much memory of a GPU the host's optimizer takes at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from hpc_train.collectives.mpi import reads_gpu_memory
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import start_runtime
from hpc_train.training.device import choose_device
from tests.system.test_same import Model, loss, optimizer_of, samples

STEPS = 6
WAYS: Mapping[str, dict[str, Any]] = {
    "as usual": {},
    "tiny buckets": {"bucket_bytes": 64},
    "not by nodes": {"two_level": "off"},
    "in node memory": {"two_level": "on"},
    "deterministic": {"deterministic": True},
    "a thread sums": {"cores": 1 << 10},
    "host optimizer, zero 1": {"zero": 1, "staged": True},
    "host optimizer, zero 2": {"zero": 2, "staged": True},
}
ON_STREAM = "computed on a stream of its own"
ON_TWO = "one layer computed on another stream"
LATE = 10_000_000  # cycles of a GPU: some milliseconds


def divert(layer: nn.Module) -> None:
    """Let a layer compute on another stream of the GPU, where its gradients come late."""
    side, forward = torch.cuda.Stream(), layer.forward

    def diverted(x: torch.Tensor) -> Any:
        usual = torch.cuda.current_stream()
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            found = forward(x)
        usual.wait_stream(side)
        return found

    layer.forward = diverted
    for parameter in layer.parameters():
        parameter.register_hook(lambda _: torch.cuda._sleep(LATE))


def trained(
    device: torch.device, group: Group, options: dict[str, Any], side: Any, *, two: bool
) -> nn.Module:
    """Train on a device, with the work on a stream `side`, or on the usual one if that is None.

    With `two`, one layer has another stream than the rest.
    """
    torch.manual_seed(group.rank)  # all but rank 0's weights are to be replaced
    model = Model().double().to(device)
    if two:
        divert(model.out)
    optimizer = optimizer_of("AdamW", model)
    averager = average_gradients(model, optimizer, group, AveragingOptions(engine="mpi", **options))
    within: AbstractContextManager[object] = nullcontext()
    if side is not None:
        side.wait_stream(getattr(torch, device.type).current_stream())
        within = getattr(torch, device.type).stream(side)
    with within:
        for step in range(STEPS):
            part = samples(step).chunk(group.size)[group.rank]
            averager.zero_grad()
            loss(model, part.to(device)).backward()
            averager.average()
            averager.scale_(1 / max(1.0, float(averager.norm())))
            averager.step()
    if side is not None:
        side.synchronize()
    averager.close()
    return model.cpu()


def most_memory(device: torch.device, group: Group) -> float:
    """Bytes that the host's optimizer takes on a GPU at most, per byte of the parameters."""
    if device.type == "cpu":
        return 1.0
    gpu: Any = getattr(torch, device.type)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gpu.reset_peak_memory_stats()
    options = AveragingOptions(engine="mpi", zero=1, staged=True, bucket_bytes=8 << 20)
    average_gradients(model, optimizer, group, options).close()
    return float(gpu.max_memory_allocated() / sum(p.nbytes for p in model.parameters()))


def reference() -> nn.Module:
    """Trained in one process on a processor."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = optimizer_of("AdamW", model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, samples(step)).backward()
        given = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(given))
        torch._foreach_mul_(given, 1 / max(1.0, norm))
        optimizer.step()
    return model


def main() -> None:
    """Train in all ways, and print the differences."""
    runtime = start_runtime()
    world, device = runtime.world, choose_device(runtime.node.rank)
    expected = list(reference().parameters())
    found = {}
    for name, options in {**WAYS, ON_STREAM: {}, ON_TWO: {}}.items():
        side = None
        if name == ON_STREAM and device.type != "cpu":
            side = getattr(torch, device.type).Stream()
        two = name == ON_TWO and device.type == "cuda"
        mine = trained(device, world, options, side, two=two).parameters()
        pairs = zip(mine, expected, strict=True)
        off = max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())
        found[name] = max(world.gathered(off if off == off else 1e9, "differences of parameters"))
    memory = most_memory(device, world)
    if world.rank == 0:
        more = {"MPI reads GPU memory": float(reads_gpu_memory()), "most memory": memory}
        print(json.dumps({"differences": found, **more}))
    runtime.close()


if __name__ == "__main__":
    main()
