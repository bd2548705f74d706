"""Collectives with a backward pass, for the places where tensor-parallel regions end.

Between the layers that a tensor-parallel group shares, its ranks either all hold the same tensor
("whole"), or each holds its part of the tokens ("cut": sequence parallelism). Each function takes a
tensor out of a region, and its backward pass takes the gradient back into it. Shoeybi et al.,
"Megatron-LM", https://arxiv.org/abs/1909.08053; Korthikanti et al., "Reducing activation
recomputation in large transformer models", https://arxiv.org/abs/2205.05198, figure 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpc_train.collectives.protocol import Collectives


class _SumForward(torch.autograd.Function):
    """Turns partial sums into their sum, whole on all ranks; the gradient is whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Collectives) -> Tensor:
        over.sum_(x.detach())
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _SumScatterForward(torch.autograd.Function):
    """Turns partial sums into this rank's part of their sum; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Collectives, dim: int) -> Tensor:
        ctx.over, ctx.dim = over, dim
        return over.start_sum_scatter(x, dim).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.over.start_gather(dy.contiguous(), ctx.dim).wait(), None, None


class _GatherForward(torch.autograd.Function):
    """Joins the ranks' rows; the gradient is summed over the ranks, and this rank's rows kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Collectives) -> Tensor:
        ctx.over = over
        return over.start_gather(x, 0).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.over.start_sum_scatter(dy.contiguous(), 0).wait(), None


def joined(x: Tensor, over: Collectives) -> Tensor:
    """The rows of all ranks, the same on all of them. Collective.

    The gradient of x is the sum over the ranks of what they compute for it.
    """
    if over.group.size == 1:
        return x
    if x.is_complex():  # sums are of real numbers
        return torch.view_as_complex(joined(torch.view_as_real(x), over))
    result: Tensor = _GatherForward.apply(x.contiguous(), over)
    return result


def summed(x: Tensor, over: Collectives) -> Tensor:
    """Replace x by its sum over the ranks, the same on all of them. Collective.

    The gradient passes through unchanged.
    """
    result: Tensor = _SumForward.apply(x, over)
    return result


def summed_and_cut(x: Tensor, over: Collectives, dim: int) -> Tensor:
    """This rank's part, along a dimension, of the sum over the ranks. Collective.

    The backward pass gathers the gradient from all ranks.
    """
    result: Tensor = _SumScatterForward.apply(x, over, dim)
    return result
