"""The 2-norm of gradients, by all cores of a rank, and exact to the last digits of float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

ROW_NUMBERS = 1 << 14
"""The number of numbers whose squares torch adds in one go.

On a processor torch adds all squares of a tensor by one core, in the tensor's own type. In float32
the norm of 50 million numbers is then off by some tenths of a percent, and differs between layouts
of ranks as their tensors do. Norms of rows are computed by all cores, and put together in float64.
"""


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all numbers of some tensors, a float64 scalar on the device of the first one.

    It is not finite if one of the numbers is not.

    Args:
        tensors: strided, of any shapes, dtypes and devices.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.device, tensor.dtype].append(tensor)
    norms = [norm for some in alike.values() for norm in _norms(some)]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    total: Tensor = vector_norm(torch.cat([one.double().to(norms[0].device) for one in norms]))
    return total


def _norms(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Norms, each of one dimension, of all numbers of some tensors of one device and dtype."""
    dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    small = list(tensors)
    if tensors[0].device.type == "cpu":
        small = [one for one in tensors if one.numel() < ROW_NUMBERS]
        for one in tensors:
            if (whole := one.numel() // ROW_NUMBERS * ROW_NUMBERS) > 0:
                flat = one.detach().reshape(-1)
                yield vector_norm(flat[:whole].view(-1, ROW_NUMBERS), dim=1, dtype=dtype)
                small += [flat[whole:]] if whole < len(flat) else []
    if small:
        yield torch.stack(torch._foreach_norm(small, 2, dtype))
