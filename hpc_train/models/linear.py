"""Linear layers that use the faster matrix library of the processor.

PyTorch's CPU wheels multiply float32 matrices with Intel's MKL, which on AMD processors stays below
AVX-512 and reaches half of what oneDNN does there, a library that the same wheels contain and use
for other types (measured: benchmarks/RESULTS.md). On such processors the products of a linear
layer, forward and backward, are given to oneDNN; everywhere else, and under `torch.autocast`, this
is torch's linear layer.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@functools.cache
def onednn_is_better() -> bool:
    """Whether float32 products on this machine's processor should go to oneDNN.

    Decided by what the machine is and not by a measurement: equal machines give equal bits.
    """
    try:
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        amd = False
    return amd and torch.backends.mkl.is_available() and _onednn_works()


def _onednn_works() -> bool:
    """Try the operator: it is not part of torch's public interface."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(3, 4, generator=generator) for _ in range(2))
    try:
        return torch.allclose(_onednn(x, weight, None), x @ weight.t(), atol=1e-5)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _onednn_takes(x: Tensor) -> bool:
    """Whether a product with x should go to oneDNN; autocast would have it in another type."""
    plain = x.dtype is torch.float32 and x.device.type == "cpu"
    return plain and not torch.is_autocast_enabled("cpu") and onednn_is_better()


def lowered(operand: Tensor) -> Tensor:
    """An operand of a matrix product as `torch.autocast` converts it, if that is on.

    For functions of our own, which autocast does not know. Called outside of them, it leaves a
    trace for autograd, so that the gradient is converted back.
    """
    kind = operand.device.type
    if operand.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return operand
    return operand.to(torch.get_autocast_dtype(kind))


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Give x (M, K) times the transpose of weight (N, K), plus bias (N): (M, N).

    It leaves no trace for autograd: for functions that bring a backward pass of their own.
    """
    if _onednn_takes(x):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


class _OneDnnLinear(torch.autograd.Function):
    """y = x W^T + b for x (M, K), W (N, K), b (N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = _onednn(dy, weight.t(), None) if needs_x else None
        dweight = _onednn(dy.t(), x.t(), None) if needs_weight else None
        dbias = dy.sum(0) if ctx.has_bias and needs_bias else None
        return dx, dweight, dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Give x W^T + b, as torch.nn.functional.linear.

    Args:
        x: of shape (..., K).
        weight: of shape (N, K).
        bias: of shape (N).

    Returns:
        A tensor of shape (..., N).
    """
    if _onednn_takes(x):
        flat: Tensor = _OneDnnLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
        return flat.view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """torch.nn.Linear, computed by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (..., K) to (..., N)."""
        return linear(x, self.weight, self.bias)
