"""Compute activations of a model's blocks again in the backward pass, in place of keeping them.

A block that is recomputed whole keeps only its inputs: Chen et al., "Training deep nets with
sublinear memory cost", https://arxiv.org/abs/1604.06174. A selective block also keeps what takes
long to compute, the results of linear layers and attention, and recomputes what lies between them:
Korthikanti et al., "Reducing activation recomputation in large transformer models",
https://arxiv.org/abs/2205.05198, section 5. `torch.utils.checkpoint` repeats the forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpc_train.errors import UserError
from hpc_train.models.dropout import SampleDropout, SeedsInUse
from hpc_train.models.kept import Results
from hpc_train.models.linear import Linear
from hpc_train.parallel.linear import Deferred
from hpc_train.parallel.tensor import matching

RecomputeBlocks = Literal["none", "selective", "full"] | int


def recompute(model: nn.Module, how: RecomputeBlocks) -> None:
    """Let a model's blocks recompute activations from now on. The gradients stay the same.

    Random numbers of torch and of `SampleDropout` are drawn again as they were drawn, and buffers
    that a block writes to, such as BatchNorm's statistics, are written once. Random numbers of
    other libraries are not repeated.

    Args:
        model: the model. Its attribute `memory_blocks` names the blocks, by patterns as in `stages`
            (docs/how-to/memory). Without it, the blocks are those modules of `stages` whose class
            occurs more than once.
        how: "full" recomputes each block whole, a number N every Nth block, beginning with the
            first, and "selective" recomputes in each block all but the results of Linear layers
            and of our own attention. "none" changes nothing.

    Raises:
        UserError: the model names no blocks, or a block lies inside another one.
    """
    for module in model.modules():  # an earlier call no longer counts
        if isinstance(module.forward, _Recomputed):
            module.forward = module.forward.original
    if how == "none":
        return
    for name in block_names(model)[:: how if isinstance(how, int) else 1]:
        block = model.get_submodule(name)
        if how == "selective":
            _let_linear_layers_keep(block)
        block.forward = _Recomputed(block, selective=how == "selective")


def block_names(model: nn.Module, key: str = "memory.recompute") -> list[str]:
    """The names of a model's blocks, in the order of its modules.

    Args:
        model: the model.
        key: the key of the configuration that needs them.

    Raises:
        UserError: as `recompute`.
    """
    named: Sequence[str] | None = getattr(model, "memory_blocks", None)
    patterns: Sequence[str] = named or getattr(model, "stages", None) or ()
    names = [name for one in patterns for name in matching(model, one, "memory_blocks")]
    if not named:
        count = Counter(type(model.get_submodule(name)) for name in names)
        names = [name for name in names if count[type(model.get_submodule(name))] > 1]
    if not names:
        raise UserError(
            f"{key} needs blocks, and {type(model).__name__} names none",
            "name its repeated modules in an attribute `memory_blocks`: docs/how-to/memory.md",
        )
    for name in names:
        if isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            raise UserError(
                f"memory_blocks: {name} is a list of modules, which is never called",
                f"name the modules in it: {name}.*",
            )
        if outer := next((one for one in names if name.startswith(f"{one}.")), None):
            raise UserError(f"memory_blocks: {name} is part of {outer}", "name each module once")
    return names


def _let_linear_layers_keep(block: nn.Module) -> None:
    """Let torch's own linear layers compute by `models.linear`, which can keep results."""
    for layer in block.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            layer.forward = MethodType(Linear.forward, layer)  # type: ignore[method-assign]


class _Recomputed:
    """Takes the place of a block's `forward`."""

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self.block, self.original, self.selective = block, block.forward, selective
        modules = list(block.modules())
        self.dropouts = [layer for layer in modules if isinstance(layer, SampleDropout)]
        self.buffers = [(one, name) for one in modules for name in one._buffers]

    @cached_property
    def deferred(self) -> Deferred | None:
        """What takes the layers' weight gradients. Layers may be replaced before the first call."""
        found = (getattr(layer, "deferred", None) for layer in self.block.modules())
        return next((one for one in found if one is not None), None)

    def __call__(self, *args: Any, **how: Any) -> Any:
        with _copies_freed():
            if not torch.is_grad_enabled():
                return self.original(*args, **how)
            contexts = lambda: _Pass(self).contexts()  # noqa: E731
            return checkpoint(self.original, *args, use_reentrant=False, context_fn=contexts, **how)


@contextmanager
def _copies_freed() -> Iterator[None]:
    """Let autocast free its 16-bit copy of a weight after use, not after the model's whole pass."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Pass:
    """What a forward pass through a block leaves for the pass that repeats it."""

    def __init__(self, block: _Recomputed) -> None:
        self.seeds = SeedsInUse(block.dropouts)
        self.results = Results() if block.selective else None
        self.buffers, self.deferred = block.buffers, block.deferred
        self.changed: list[tuple[nn.Module, str, Tensor]] = []  # buffers as the pass found them

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of the forward pass and of its repetitions."""
        return self._first(), _Anew(self._again)

    @contextmanager
    def _first(self) -> Iterator[None]:
        found = [(one, name, one._buffers[name]) for one, name in self.buffers]
        before = [
            (one, name, buffer.clone(), buffer, buffer._version)
            for one, name, buffer in found
            if buffer is not None
        ]
        # A backward pass inside of the block repeats the pass before it is known which it changes.
        self.changed = [(one, name, copy) for one, name, copy, *_ in before]
        with ExitStack() as stack:
            if self.results is not None:
                stack.enter_context(self.results.taken())
            yield
        self.changed = [
            (one, name, copy)
            for one, name, copy, buffer, version in before
            if one._buffers[name] is not buffer
            or buffer._version != version
            or hasattr(one, "running_mean")  # torch does not count BatchNorm's changes
        ]

    @contextmanager
    def _again(self) -> Iterator[None]:
        now = [(one, name, one._buffers[name]) for one, name, _ in self.changed]
        for one, name, before in self.changed:
            one._buffers[name] = before.clone()
        try:
            with ExitStack() as stack:
                stack.enter_context(self.seeds.again())
                if self.deferred is not None:
                    stack.enter_context(self.deferred.apart())
                if self.results is not None:
                    stack.enter_context(self.results.given())
                yield
        finally:
            for one, name, buffer in now:
                one._buffers[name] = buffer


class _Anew(AbstractContextManager[None]):
    """A context that can be entered several times: a graph that is retained is repeated again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self.make, self.entered = make, ExitStack()

    def __enter__(self) -> None:
        self.entered.enter_context(self.make())

    def __exit__(self, *error: Any) -> None:
        self.entered.__exit__(*error)
