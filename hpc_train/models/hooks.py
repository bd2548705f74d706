"""Whether a module has hooks, which a module in its place would not have."""

from __future__ import annotations

from torch import nn

OF_MODULE = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
OF_PARAMETER = "_backward_hooks", "_post_accumulate_grad_hooks"


def has_hooks(module: nn.Module) -> bool:
    """Whether a module or one of its own parameters has hooks.

    A `forward` that was set on the module itself counts: accelerate adds its hooks in this way.
    """
    own = module.parameters(recurse=False)
    of_module = "forward" in vars(module) or any(getattr(module, kind) for kind in OF_MODULE)
    return of_module or any(getattr(one, kind) for one in own for kind in OF_PARAMETER)
