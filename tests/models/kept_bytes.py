"""What a module's forward pass keeps for its backward pass."""

from __future__ import annotations

import torch
from torch import nn


def kept_bytes(module: nn.Module, *inputs: torch.Tensor, dtype=torch.float32) -> int:
    """Bytes that autograd keeps, without the module's weights; with autocast below 32 bits."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so addresses stay unique
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
    ):
        module(*inputs)
    return sum(nbytes for nbytes, _ in kept.values())
