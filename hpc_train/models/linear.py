"""Linear layers that multiply float32 matrices with the library that is faster on the processor.

PyTorch's CPU wheels multiply float32 matrices with Intel's MKL, which does not use AVX-512 on AMD
processors. The same wheels contain oneDNN for other types, and oneDNN does use it. If the table of
`host.processor` says so, oneDNN computes the products of a linear layer, forward and backward. In
all other cases, and under `torch.autocast`, this is torch's linear layer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train.errors import ConfigError
from hpc_train.host import processor
from hpc_train.host.processor import Way
from hpc_train.models.kept import keeps, kept


class MatmulChoice(NamedTuple):
    """A way to multiply float32 matrices, and the reason for it in words."""

    way: Way
    why: str


_used: Way | None = None


def use(way: Way) -> None:
    """Set how this process multiplies float32 matrices. By default it does as the table says.

    Raises:
        ConfigError: oneDNN does not work here.
    """
    global _used
    if way == "onednn" and not onednn_works():
        raise ConfigError(
            f"oneDNN's matrix product does not work in torch {torch.__version__} on this machine",
            "leave precision.matmul out, or give torch",
        )
    _used = way


def used() -> Way:
    """The way in which this process multiplies float32 matrices."""
    return _used or of_table().way


@functools.cache
def of_table() -> MatmulChoice:
    """The table's choice for this processor, or torch's own way if this torch lacks a library."""
    kind = processor.here().kind
    cell = processor.cell(kind)
    if cell.way == "onednn" and not torch.backends.mkl.is_available():
        return MatmulChoice("torch", f"{kind}, without MKL in torch, which nobody has measured")
    if cell.way == "onednn" and not onednn_works():
        return MatmulChoice(
            "torch", f"{kind}, where oneDNN does not work in torch {torch.__version__}"
        )
    return MatmulChoice(cell.way, f"{kind}, {cell}")


@functools.cache
def onednn_works() -> bool:
    """Whether oneDNN's operator works. It is tried, as it is not in torch's public interface."""
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
    """Whether oneDNN should compute a product with x. Autocast would use another type.

    torch.compile chooses by itself. oneDNN's operator refuses an x without elements.
    """
    if torch.compiler.is_compiling():
        return False
    plain = x.dtype is torch.float32 and x.device.type == "cpu" and x.numel() > 0
    return plain and not torch.is_autocast_enabled("cpu") and used() == "onednn"


def lowered(operand: Tensor) -> Tensor:
    """Convert an operand of a matrix product as `torch.autocast` would; unchanged if that is off.

    It is for the operands of our own autograd functions, which autocast does not know. Call it
    outside of them: autograd then records the conversion, and converts the gradient back.
    """
    kind = operand.device.type
    if operand.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return operand
    return operand.to(torch.get_autocast_dtype(kind))


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b of shape (M, N) for x (M, K), weight W (N, K) and bias b (N).

    With oneDNN, autograd does not record it. So it is for functions that have a backward pass of
    their own.
    """
    if _onednn_takes(x):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """y = x W^T + b for x (M, K), W (N, K), b (N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # A frozen weight has no gradient, so its input need not be kept.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.has_bias = bias is not None
        return kept(lambda: product(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = product(dy, weight.t()) if needs_x else None
        dweight = product(dy.t(), x.t()) if needs_weight else None
        dbias = dy.sum(0) if ctx.has_bias and needs_bias else None
        return dx, dweight, dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b, as torch.nn.functional.linear does.

    Args:
        x: of shape (..., K).
        weight: of shape (N, K).
        bias: of shape (N).

    Returns:
        A tensor of shape (..., N).
    """
    if not _onednn_takes(x) and not keeps():
        return F.linear(x, weight, bias)
    x, weight, bias = lowered(x), lowered(weight), None if bias is None else lowered(bias)
    flat: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return flat.view(*x.shape[:-1], weight.shape[0])


class Linear(nn.Linear):
    """torch.nn.Linear, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Transform an input of shape (..., K) to (..., N)."""
        return linear(input, self.weight, self.bias)
