"""Writes into tensors that `expand` has made, several of whose elements lie at one place."""

from __future__ import annotations

from torch import Tensor


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Replace a tensor's elements by the values, of the same shape.

    torch refuses to write to one place in memory twice. So each place gets the first of its values.
    """
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements lie at one place, as `expand` makes it."""
    return any(
        not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
