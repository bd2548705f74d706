"""The 2-norm of gradients. All cores of a rank compute it, and it keeps all digits of float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

ROW_ELEMENTS = 1 << 14
"""The length of the rows into which a tensor on a processor is cut.

One core adds all squares of a tensor there, and torch adds them in the tensor's own type. In
float32 the norm of 50 million elements is then too small by 0.4 %. It also differs between layouts,
because their tensors have other lengths. Here all cores compute norms of rows, which are put
together in float64.
"""


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all elements of some tensors, a float64 scalar on the device of the first one.

    It is not finite if one of the elements is not.

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
    """Norms of parts, in tensors of one dimension. The given tensors have one device and dtype."""
    dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    small = list(tensors)
    if tensors[0].device.type == "cpu":
        small = [one for one in tensors if one.numel() < ROW_ELEMENTS]
        for one in tensors:
            if (whole := one.numel() // ROW_ELEMENTS * ROW_ELEMENTS) > 0:
                flat = one.detach().reshape(-1)
                yield vector_norm(flat[:whole].view(-1, ROW_ELEMENTS), dim=1, dtype=dtype)
                small += [flat[whole:]] if whole < len(flat) else []
    if small:
        yield torch.stack(torch._foreach_norm(small, 2, dtype))
