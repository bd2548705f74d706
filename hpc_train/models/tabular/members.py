"""The parts that differ between the members of an ensemble: K members, B rows.

The members share the matrices of their layers. Each has its own factors in front of and behind a
matrix, as in Wen et al., "BatchEnsemble", https://arxiv.org/abs/2002.06715. A model of a table
computes all of them at once, as in Gorishniy et al., "TabM", https://arxiv.org/abs/2410.24210. Each
layer is then one matrix product over all rows and members.

Between two layers there is a ReLU, which commutes with factors above 0. So the factors in front of
a matrix are those behind the one before, and only the first layer has both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train.models.dropout import SampleDropout
from hpc_train.models.initial import Initial
from hpc_train.models.tabular.embeddings import parameter


class MemberScale(nn.Module):
    """Each member's factors and biases of a layer's results.

    Args:
        members: number of members K.
        width: number of the layer's results C.
    """

    stacked_vectors = ("weight", "bias")

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(members, width)
        self.bias = parameter(members, width)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        return {"weight": Initial(mean=1.0), "bias": Initial()}

    def forward(self, x: Tensor, dropout: SampleDropout) -> Tensor:
        """Scale and shift results (B, K, C), of all or some of the C, then a ReLU and dropout."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if torch.compiler.is_compiling():  # it joins these steps by itself
            plain: Tensor = dropout(torch.addcmul(bias, x, weight).relu())
            return plain
        scaled: Tensor = _ScaledRelu.apply(x, weight, bias, dropout)
        return scaled


class _ScaledRelu(torch.autograd.Function):
    """y = relu(x w + b) m f for x (B, K, C), w and b (K, C), masks m, and a factor f of dropout.

    It takes the steps that autograd would record, and gives the same numbers. But some rows at a
    time go through all steps while they are in the processor's cache. No masks are kept, because
    an element that has a gradient is above 0 in y.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dropout: SampleDropout
    ) -> Tensor:
        ctx.factor = dropout.factor if dropout.drops else 1.0
        if dropout.drops:
            y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            for rows, masks in dropout.masks(x):
                some = torch.addcmul(bias, x[rows], weight, out=y[rows]).relu_()
                some.mul_(masks).mul_(ctx.factor)
        else:
            y = torch.addcmul(bias, x, weight).relu_()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, y = ctx.saved_tensors
        dz = torch.ops.aten.threshold_backward(dy, y, 0)
        if ctx.factor != 1:
            dz.mul_(ctx.factor)
        dweight, dbias = (dz * x).sum(0), dz.sum(0)
        return dz.mul_(weight), dweight, dbias, None


class MemberHeads(nn.Module):
    """A linear layer of each member, which shares nothing with the others.

    Args:
        members: number of members K.
        width: width C of the input.
        outputs: number of results of each member.
    """

    stacked_vectors = ("bias",)

    def __init__(self, members: int, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = parameter(members, width, outputs)
        self.bias = parameter(members, outputs)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        return {"weight": Initial(std=self.weight.shape[1] ** -0.5), "bias": Initial()}

    def forward(self, x: Tensor) -> Tensor:
        """Turn x of shape (B, K, C) into results of shape (B, K, outputs)."""
        members = torch.baddbmm(self.bias.unsqueeze(1), x.transpose(0, 1), self.weight)
        return members.transpose(0, 1)
