"""RMS norms, of all channels of a token or of those of each attention head.

They are from Zhang and Sennrich, "Root mean square layer normalization",
https://arxiv.org/abs/1910.07467: y = x / sqrt(mean(x^2) + eps) * w over the last dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _RmsNorm(torch.autograd.Function):
    """The norm of x (..., D) by a weight (D). It keeps x and one number per token.

    Torch has a fused norm on GPUs only. Its general one keeps the normalized x besides.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        normed = x * scale
        dx = dweight = None
        if needs_weight:
            dweight = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if needs_x:
            dnormed = dy * weight
            share = (dnormed * normed).mean(-1, keepdim=True)
            dx = dnormed.addcmul(normed, share, value=-1).mul_(scale).to(x.dtype)
        return dx, dweight, None


class RmsNorm(nn.RMSNorm):
    """An RMS norm with a weight.

    Args:
        width: size D of the last dimension.
        eps: what is added to the mean square.
    """

    weight: nn.Parameter

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x of shape (..., D); returns the same shape and type."""
        if x.is_cuda or torch.compiler.is_compiling():
            # Under autocast x may have fewer bits than the weight, and torch wants the same.
            return super().forward(x.to(self.weight.dtype)).to(x.dtype)
        normed: Tensor = _RmsNorm.apply(x, self.weight, self.eps)
        return normed


class HeadNorm(RmsNorm):
    """An RMS norm of the channels of each attention head, whose weight all heads share.

    Tensor-parallel ranks have some of the heads each, and the whole weight, so their gradients have
    to be summed (see `hpc_train.parallel`).
    """

    divided = False
    """Whether ranks divide the heads."""

    @property
    def partial(self) -> list[nn.Parameter]:
        """The parameters of whose gradients each rank computes a part."""
        return [self.weight] if self.divided else []
