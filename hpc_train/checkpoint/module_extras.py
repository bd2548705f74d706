"""What modules keep beside tensors (`get_extra_state`), where it is plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hpc_train.errors import CheckpointMismatch

SUFFIX = "_extra_state"


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep something, by its name in the model's `state_dict`."""
    return {
        f"{name}.{SUFFIX}" if name else SUFFIX: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def values(model: nn.Module) -> dict[str, Any]:
    """What they keep now."""
    return {name: module.get_extra_state() for name, module in modules(model).items()}


def put(model: nn.Module, saved: Mapping[str, Any], path: object) -> None:
    """Give modules what they kept when a checkpoint was made.

    Raises:
        CheckpointMismatch: the checkpoint has it of other modules.
    """
    keep = modules(model)
    for name in sorted(keep.keys() ^ saved.keys()):
        where = "the model" if name in keep else "the checkpoint"
        raise CheckpointMismatch(
            f"{path} is of another model: only {where} has {name}",
            "use the model that it was made with",
        )
    for name, module in keep.items():
        module.set_extra_state(saved[name])
