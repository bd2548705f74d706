"""One rank's forward and backward pass of a Llama: ours beside the one of transformers.

    python -m benchmarks.llama_step

Both have the same weights and data, in float32, and one thread. Light is 1 x 256 tokens per step,
heavy 8 x 256. It checks that the losses are the same. Ours runs with the choice of the table of
`host.processor` for float32 matrices, and with torch's own products, as transformers has them. The
figure "kept" is what autograd keeps from the forward to the backward pass, per token, without the
weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.gpt_step import timed
from hpc_train.checkpoint.weights import start_from
from hpc_train.host.processor import Way
from hpc_train.models import linear
from hpc_train.models.llama.hugging_face import llama_config
from hpc_train.models.llama.shape import LlamaShape
from hpc_train.mpi.group import Group

SHAPE = LlamaShape(
    layers=6,
    hidden=384,
    heads=6,
    kv_heads=2,
    head_width=64,
    mlp_width=1024,
    vocab=512,
    sequence=256,
    rope_theta=1e4,
    norm_eps=1e-5,
)
LOADS = {"light": 1, "heavy": 8}


def both() -> tuple[nn.Module, nn.Module]:
    """Our model and that of transformers, with its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**llama_config("llama", asdict(SHAPE)))
    )
    ours = SHAPE.build()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        start_from(Path(folder), ours, {}, Group())
    return ours, theirs


def loss_of_theirs(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy. The model's own loss would shift the targets."""
    logits = model(tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stepping(
    model: nn.Module, loss_of: Callable[[], Tensor], way: Way = "torch"
) -> Callable[[], float]:
    """A step: forward and backward pass."""

    def step() -> float:
        linear.use(way)
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        return float(loss.detach())

    return step


def kept(model: nn.Module, loss_of: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so it stays the only one
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of()
    return sum(nbytes for nbytes, _ in found.values())


def main() -> None:
    """Run both loads."""
    options = harness.arguments("a Llama's step of one rank", rounds=9)
    torch.set_num_threads(1)
    choice = linear.of_table()
    print(f"the table: {choice.way} ({choice.why})")
    ours, theirs = both()
    ratios, middles = {}, {}
    for load, samples in LOADS.items():
        torch.manual_seed(1)
        text = torch.randint(SHAPE.vocab, (samples, SHAPE.sequence + 1))
        batch = (text[:, :-1], text[:, 1:])
        of_ours, of_theirs = partial(ours, *batch), partial(loss_of_theirs, theirs, *batch)
        torch.testing.assert_close(of_ours(), of_theirs(), rtol=1e-5, atol=0)
        steps = {
            "ours": stepping(ours, of_ours, choice.way),
            "ours, torch": stepping(ours, of_ours),
            "transformers": stepping(theirs, of_theirs),
        }
        tokens = batch[0].numel()
        found = harness.in_turn(
            {name: timed(step, tokens, 8 // samples) for name, step in steps.items()},
            options.rounds,
        )
        harness.show(f"{load}: {samples} x 256 tokens", "tokens/s", found, "transformers")
        for name in ("ours", "ours, torch"):
            ratios[f"{load} {name}"] = harness.paired_ratio(found, name, "transformers")
        middles |= {f"{load} {name}": value for name, value in harness.medians(found).items()}
        for name, nbytes in (
            ("ours", kept(ours, of_ours)),
            ("transformers", kept(theirs, of_theirs)),
        ):
            print(f"kept, {name}: {nbytes / tokens / 1024:.1f} KiB per token")
            middles[f"{load} KiB kept per token, {name}"] = nbytes / tokens / 1024
    harness.finish("llama_step", ratios, middles, options.json)


if __name__ == "__main__":
    main()
