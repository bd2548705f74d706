"""Writes into tensors that `expand` has made, several of whose elements lie at one place."""

from __future__ import annotations

import torch
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


def bring_back(tensor: Tensor, near: Tensor) -> Tensor:
    """Overwrite a tensor by what was received in its place, unless that is the tensor itself."""
    if near.data_ptr() != tensor.data_ptr():
        overwrite(tensor, near)
    return tensor


def bits(near: Tensor) -> Tensor:
    """A contiguous tensor's bytes: Horovod does not send all types, and MPI knows few."""
    # One element may have any stride and is contiguous, but torch takes its bytes with stride 1.
    return near.as_strided((near.numel(),), (1,)).view(torch.uint8)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements lie at one place, as `expand` makes it."""
    return any(
        not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
