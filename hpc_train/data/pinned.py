"""Batches in pinned memory, from which a GPU copies while the processor goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hpc_train.data.substitutes import Substituted


def each_tensor(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with other tensors in place of its own, also inside lists, tuples and dicts."""
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, dict):
        return {key: each_tensor(value, change) for key, value in data.items()}
    if isinstance(data, Substituted):
        changed = (each_tensor(value, change) for value in data)
        return Substituted.of((*changed,), data.pairs, data.causes)
    if isinstance(data, list | tuple):
        made = [each_tensor(value, change) for value in data]
        return data._make(made) if hasattr(data, "_make") else type(data)(made)  # a named tuple
    return data


def pinned(data: Any) -> Any:
    """A batch whose tensors are copied to pinned memory.

    torch keeps the pinned memory of tensors that are gone, and gives it to later ones. It waits for
    the event behind the last copy from there to a GPU first, so no copy reads what comes later.
    """
    return each_tensor(data, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())
