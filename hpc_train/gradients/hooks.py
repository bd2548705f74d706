"""Hooks of an optimizer's step that torch.compile leaves out of what it compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Closure = Callable[[], Any]
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


def before_any_step(hook: Hook) -> RemovableHandle:
    """Register a hook that is called before each step of each optimizer; see `before_step`."""
    return register_optimizer_step_pre_hook(_uncompiled(hook))


def replaced_closure(args: Any, kwargs: Any, change: Callable[[Closure], Closure]) -> Any:
    """What a hook returns so that a step has another closure; None if the step has no closure.

    Args:
        args: of the step, as torch gives them to the hook.
        kwargs: of the step, too.
        change: makes the other closure.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], change(closure), *args[2:]), rest


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
