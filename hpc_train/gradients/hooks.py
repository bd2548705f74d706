"""Hooks of an optimizer's step that torch.compile leaves out of what it compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def before_step(optimizer: Optimizer, hook: Hook) -> RemovableHandle:
    """Register a hook that is called before each step, also before a compiled one.

    Args:
        optimizer: the optimizer; `torch.compile(optimizer.step)` may make its steps.
        hook: a hook as for `Optimizer.register_step_pre_hook`. It may communicate.
    """
    return optimizer.register_step_pre_hook(_uncompiled(hook))


def after_step(optimizer: Optimizer, hook: Hook) -> RemovableHandle:
    """Register a hook that is called after each step; see `before_step`."""
    return optimizer.register_step_post_hook(_uncompiled(hook))


def _uncompiled(hook: Hook) -> Hook:
    """Keep torch.compile from tracing a hook, without loading torch.compile.

    The decorator torch.compiler.disable would load it, which takes as long as loading torch itself.
    """
    kept: list[Hook] = []

    def called(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return hook(optimizer, args, kwargs)
        if not kept:
            kept.append(dynamo.disable(hook))
        return kept[0](optimizer, args, kwargs)

    return called
