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
from torch.autograd.function import once_differentiable

from hpc_train.collectives.protocol import Collectives, check_has_dimension
from hpc_train.errors import UserError, plural


def check_no_transform(what: str, remedy: str) -> None:
    """Refuse torch.func's transforms. They call with tensors that have no memory to communicate.

    Raises:
        UserError: a transform is active on this rank, and so on all that run the same program.
    """
    if torch._C._are_functorch_transforms_active():
        raise UserError(
            f"{what} needs the samples of all ranks, and torch.func (grad ...) does not see them",
            remedy,
        )


def check_divided(tokens: int, over: Collectives) -> None:
    """Check that the ranks can have equal parts of the tokens.

    Raises:
        UserError: they cannot; on all of them.
    """
    size = over.group.size
    if tokens % size:
        raise UserError(
            f"sequence parallelism cannot cut {plural(tokens, 'token')} into equal parts for the "
            f"{size} ranks of parallel.tp",
            f"give samples a multiple of {size} tokens, or leave parallel.sequence_parallel out",
        )


class _SumForward(torch.autograd.Function):
    """Turns partial sums into their sum, whole on all ranks; the gradient is whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Collectives) -> Tensor:
        over.sum_(x.detach())
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _SumScatter(torch.autograd.Function):
    """Turns partial sums into this rank's part of their sum; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Collectives, dim: int) -> Tensor:
        ctx.over, ctx.dim = over, dim
        return over.start_sum_scatter(x, dim).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(dy.contiguous(), ctx.over, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    """Joins the ranks' parts; the gradient is summed over the ranks, and this rank's part kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Collectives, dim: int) -> Tensor:
        ctx.over, ctx.dim = over, dim
        return over.start_gather(x, dim).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _SumScatter.apply(dy.contiguous(), ctx.over, ctx.dim), None, None


def joined(x: Tensor, over: Collectives) -> Tensor:
    """The rows of all ranks, the same on all of them. Collective.

    The gradient of x is the sum over the ranks of what they compute for it. It can be
    differentiated again.

    Raises:
        UserError: x has no dimensions, and so no rows.
    """
    check_has_dimension(x)
    if over.group.size == 1:
        return x
    if x.is_complex():  # sums are of real numbers
        return torch.view_as_complex(joined(torch.view_as_real(x), over))
    result: Tensor = _Gather.apply(x.contiguous(), over, 0)
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

    Raises:
        UserError: the ranks do not divide the dimension.
    """
    check_divided(x.shape[dim], over)
    result: Tensor = _SumScatter.apply(x, over, dim)
    return result
