"""Whether a module has hooks, which a module in its place would not have."""

from __future__ import annotations

from torch import nn

from hpc_train.models.linear import Linear

OF_MODULE = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
OF_PARAMETER = "_backward_hooks", "_post_accumulate_grad_hooks"


def has_hooks(module: nn.Module) -> bool:
    """Whether a module or one of its own parameters has hooks.

    A `forward` of another function that was set on the module itself counts: accelerate adds its
    hooks in this way. Ours is set on it as well, when it is put back and by recomputation.
    """
    forward, ours = vars(module).get("forward"), (type(module).forward, Linear.forward)
    if forward is not None and getattr(forward, "__func__", None) not in ours:
        return True
    own = module.parameters(recurse=False)
    return any(getattr(module, kind) for kind in OF_MODULE) or any(
        getattr(parameter, kind) for parameter in own for kind in OF_PARAMETER
    )
