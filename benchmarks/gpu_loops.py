"""What benchmarks.gpu measures without the program: the GPU itself, and loops in plain PyTorch.

    python -m benchmarks.gpu_loops software
    python -m benchmarks.gpu_loops limits [--size N]
    python -m benchmarks.gpu_loops estimator
    python -m benchmarks.gpu_loops host --shape '{...}'
    python -m benchmarks.gpu_loops loop --kind KIND --shape '{...}' --batch N

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.functional import scaled_dot_product_attention as attend

from hpc_train.gradients.norms import total_norm
from hpc_train.models import GPT
from hpc_train.parallel.compiled import compile_blocks
from hpc_train.training.device import built_for, choose_device

KINDS = ("plain", "compiled", "blocks", "graphs", "trainer", "transformers")
ROUNDS = 5
SECONDS = 0.3  # of a measurement


def wait(device: torch.device) -> None:
    """Wait until a device has done its work."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, over ROUNDS of as many calls as take SECONDS."""
    call()
    wait(device)
    begin = time.perf_counter()
    call()
    wait(device)
    count = max(1, int(SECONDS / max(time.perf_counter() - begin, 1e-6)))
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait(device)
        times.append((time.perf_counter() - begin) / count)
    return statistics.median(times)


def software() -> dict[str, Any]:
    """The device's name, and the versions of what computes."""
    device = choose_device()
    module = None if device.type == "cpu" else getattr(torch, device.type)
    build, why = built_for()
    return {
        "device": module.get_device_name(device) if module else "",
        "gpus": module.device_count() if module else 0,
        "gpu_bytes": module.mem_get_info()[1] if module else 0,
        "torch": torch.__version__,
        "build": f"{build} {torch.version.cuda or getattr(torch.version, 'hip', '') or ''}".strip(),
        "why_no_gpu": why,
        "python": platform.python_version(),
        "mpi": _mpi(),
        "nccl": _nccl(device),
    }


def _mpi() -> str:
    """The MPI library. It is not started, which some can do under their launcher only."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return str(MPI.Get_library_version().splitlines()[0].strip(chr(0)))


def _nccl(device: torch.device) -> str:
    """The version of NCCL in torch; "" if it has none."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return str(torch.cuda.nccl.version()) if device.type == "cuda" else ""
    return ""


def limits(size: int) -> dict[str, float]:
    """Matrix products in TFLOP/s, copies in GB/s, and attention in ms."""
    device, found = choose_device(), {}
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        one = torch.randn(size, size, device=device, dtype=torch.float32)
        one = one.to(getattr(torch, dtype))
        other = torch.empty_like(one)
        taken = seconds_of(lambda a=one, b=other: torch.mm(a, a, out=b), device)
        found[f"matrix {dtype}"] = 2 * size**3 / taken / 1e12
    near = torch.empty(size * size * 4, dtype=torch.uint8, device=device)
    for name, pinned in (("pinned", device.type == "cuda"), ("pageable", False)):
        host = torch.zeros(near.numel(), dtype=torch.uint8, pin_memory=pinned)
        there = seconds_of(lambda h=host: near.copy_(h, non_blocking=True), device)
        back = seconds_of(lambda h=host: h.copy_(near, non_blocking=True), device)
        found[f"copy to the device, {name}"] = near.numel() / there / 1e9
        found[f"copy to the host, {name}"] = near.numel() / back / 1e9
    return found | attention(device)


def attention(device: torch.device) -> dict[str, float]:
    """Milliseconds of attention, forward and backward, by each of torch's ways and by its choice.

    The shape is that of a GPT of 124 million parameters with 8 samples. A way that does not work
    here is missing.
    """
    if device.type != "cuda":
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.randn(8, 12, 1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

    def once() -> None:
        attend(query, query, query, is_causal=True).sum().backward()

    found = {"attention, torch's choice": 1e3 * seconds_of(once, device)}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        with contextlib.suppress(AttributeError, RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with sdpa_kernel(getattr(SDPBackend, name)):
                found[f"attention, {name.lower()}"] = 1e3 * seconds_of(once, device)
    return found


def host(shape: dict[str, int]) -> dict[str, float]:
    """Seconds that processors take for the optimizer's step of a GPT, and for its norm."""
    with torch.device("meta"):
        sizes = [tuple(p.shape) for p in GPT(**shape).parameters()]
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    gradients, cpu = [p.grad for p in parameters if p.grad is not None], torch.device("cpu")
    return {
        "optimizer": seconds_of(optimizer.step, cpu),
        "norm": seconds_of(lambda: total_norm(gradients), cpu),
        "threads": float(torch.get_num_threads()),
    }


def estimator() -> dict[str, Any]:
    """What a classifier of tables predicts, in float64."""
    from hpc_train.tabular import Classifier

    draws = np.random.default_rng(0)
    table = draws.normal(size=(300, 5))
    target = (table[:, 0] * table[:, 1] + table[:, 2] > 0).astype(int)
    model = Classifier(steps=40, seed=0, config={"precision.dtype": "float64"})
    chances = model.fit(table[:200], target[:200]).predict_proba(table[200:])
    return {"chances": chances[:, 1].tolist(), "accuracy": model.score(table[200:], target[200:])}


def batches(shape: dict[str, int], batch: int) -> list[tuple[Tensor, Tensor]]:
    """Some batches of random tokens, in the host's memory."""
    torch.manual_seed(1)
    text = torch.randint(shape["vocab"], (4, batch, shape["sequence"] + 1))
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in text]


def gpt2_of_others(shape: dict[str, int]) -> torch.nn.Module:
    """The GPT-2 of the library transformers. It takes tokens and targets, and returns the loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": shape["hidden"], "n_layer": shape["layers"], "n_head": shape["heads"]}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=shape["vocab"], n_positions=shape["sequence"], use_cache=False, **sizes, **drop
    )

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT2LMHeadModel(config)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = self.gpt(input_ids=tokens).logits.float()
            return cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Loss()


def compiled(kind: str, model: torch.nn.Module, device: torch.device) -> Any:
    """What a loop of a kind calls in place of its model."""
    if kind == "plain":
        return model
    if kind == "blocks":
        compile_blocks(model, device)
        return model
    return torch.compile(model, mode="reduce-overhead" if kind == "graphs" else None)


def loop(kind: str, shape: dict[str, int], batch: int, steps: int) -> dict[str, float]:
    """Tokens per second of a loop in bfloat16 with float32 weights, without and with torch.compile.

    "blocks" compiles each block by itself, as the program does. "graphs" is a compiled loop whose
    passes are started as CUDA graphs, by torch's mode "reduce-overhead". "trainer" is a compiled
    loop that clips gradients, sets the learning rate, and asks for the loss and the norm in each
    step, as trainers of others do. "transformers" does so with the GPT-2 of the library of that
    name.
    """
    device = choose_device()
    torch.manual_seed(0)
    with device if kind == "transformers" else contextlib.nullcontext():
        model = gpt2_of_others(shape) if kind == "transformers" else GPT(**shape)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    computed = compiled(kind, model, device)
    given = batches(shape, batch)
    if device.type == "cuda":
        given = [(x.pin_memory(), y.pin_memory()) for x, y in given]
    last = 0.0

    def step(number: int) -> Tensor:
        nonlocal last
        x, y = (t.to(device, non_blocking=True) for t in given[number % len(given)])
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = computed(x, y)
        loss.backward()
        if kind in ("trainer", "transformers"):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 3e-4 * (1 - number / (10 * steps))
            last = float(norm) + loss.item()
        optimizer.step()
        return loss.detach()

    begin = time.perf_counter()
    for number in range(3):
        step(number)
    wait(device)
    compiling = time.perf_counter() - begin
    every = []
    for part in range(ROUNDS):
        begin = time.perf_counter()
        for number in range(steps // ROUNDS):
            loss = step(part * ROUNDS + number)
        wait(device)
        every.append(batch * shape["sequence"] * (steps // ROUNDS) / (time.perf_counter() - begin))
    assert 0 < float(loss) < 20, f"the loss is {float(loss)}"
    found = {"tokens_per_second": statistics.median(every), "first_steps": compiling}
    if device.type != "cpu":
        found["memory_gb"] = getattr(torch, device.type).max_memory_allocated() / 1e9
    return found


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description="measurements for benchmarks.gpu")
    parser.add_argument("what", choices=("software", "limits", "host", "estimator", "loop"))
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--shape", type=json.loads)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if options.what == "software":
        found: dict[str, Any] = software()
    elif options.what == "limits":
        found = limits(options.size)
    elif options.what == "host":
        found = host(options.shape)
    elif options.what == "estimator":
        found = estimator()
    else:
        found = loop(options.kind, options.shape, options.batch, options.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
