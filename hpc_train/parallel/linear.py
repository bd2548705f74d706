"""Linear layers of which each rank of a tensor-parallel group holds a part.

Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model
parallelism", https://arxiv.org/abs/1909.08053, section 3. A column-parallel layer holds rows of the
weight (N, K), so each rank computes its part of the outputs from the whole input; a row-parallel
layer holds columns, takes its part of the inputs, and the ranks' results are summed. With sequence
parallelism the tensors outside of the pair are cut along the tokens (dimension 1): the sum becomes
a reduce-scatter, and the input is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from hpc_train.collectives import Collectives
from hpc_train.models.linear import lowered, product

TOKENS = 1  # the dimension that sequence parallelism cuts


class Deferred:
    """Weight gradients that a backward pass leaves for later (zero-bubble schedules)."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Parameter, Callable[[], Tensor]]] = []

    def take(self) -> list[tuple[Parameter, Callable[[], Tensor]]]:
        """What has been left since the last call."""
        waiting, self.waiting = self.waiting, []
        return waiting


def compute(deferred: list[tuple[Parameter, Callable[[], Tensor]]]) -> None:
    """Compute weight gradients that were left for later, and add them as a backward pass would."""
    gradients: dict[Parameter, Tensor] = {}
    for parameter, gradient in deferred:
        known = gradients.get(parameter)
        gradients[parameter] = gradient() if known is None else known.add_(gradient())
    for parameter, total in gradients.items():
        parameter.backward(total)  # and not `grad +=`, so that hooks run


class _Linear(torch.autograd.Function):
    """y = x W^T for x (..., K): gathers its input or sums its output over the layer's ranks.

    One function and not three, so that sums take place where the product left them, and so that
    communication goes on while the weight's gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ParallelLinear
    ) -> Tensor:
        ctx.layer, ctx.has_bias = layer, bias is not None
        ctx.save_for_backward(x, weight)
        if layer.gathers:
            x = layer.over.start_gather(x, TOKENS).wait()
        ctx.shape = x.shape
        y = product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
        if layer.style == "rowwise":
            if layer.cut:
                return layer.over.start_sum_scatter(y, TOKENS).wait()
            layer.over.sum_(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        layer: ParallelLinear = ctx.layer
        x, weight = ctx.saved_tensors
        # Of a gathered input only this rank's part was kept; the rest comes while dx is computed.
        gathering = layer.over.start_gather(x, TOKENS) if layer.gathers else None
        if layer.style == "rowwise" and layer.cut:
            dy = layer.over.start_gather(dy.contiguous(), TOKENS).wait()
        flat = dy.reshape(-1, dy.shape[-1])
        dx = product(flat, weight.t()).view(ctx.shape) if ctx.needs_input_grad[0] else None
        if gathering is not None:
            x = gathering.wait()
        summing = None
        if dx is not None and layer.style == "colwise":  # its sum goes on below
            over = layer.over
            summing = over.start_sum_scatter(dx, TOKENS) if layer.cut else over.start_sum_(dx)

        def dweight() -> Tensor:
            found = product(flat.t(), x.reshape(-1, x.shape[-1]).t())
            return found.to(layer.weight.dtype)  # what is added to it later has to have its type

        found = dweight() if ctx.needs_input_grad[1] else None
        if found is None and layer.deferred is not None and layer.weight.requires_grad:
            layer.deferred.waiting.append((layer.weight, dweight))
        dbias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return summing.wait() if summing is not None else dx, found, dbias, None


class ParallelLinear(nn.Module):
    """A linear layer, or this rank's part of one.

    Args:
        weight: this rank's part of (N, K): all of it, or its rows for style colwise, or its
            columns for style rowwise.
        bias: None, or a part like that of the rows; all of it for style rowwise.
        style: what the ranks share.
        over: the tensor-parallel group.
        cut: whether the tensors outside of a colwise and rowwise pair are cut along the tokens.
        deferred: where weight gradients are left for later; None computes them at once.
    """

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        style: Literal["whole", "colwise", "rowwise"],
        over: Collectives,
        *,
        cut: bool = False,
        deferred: Deferred | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias: Parameter | None
        self.register_parameter("bias", bias)
        self.style, self.over, self.cut, self.deferred = style, over, cut, deferred

    @property
    def gathers(self) -> bool:
        """Whether the input comes cut along the tokens and is needed whole."""
        return self.cut and self.style == "colwise"

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (..., K) to (..., N). Collective over the tensor group.

        K is this rank's part for style rowwise, N for style colwise. Under `torch.autocast` the
        product and what the ranks exchange have its type.
        """
        later = self.bias if self.style == "rowwise" else None  # added once, to the sum
        at_once = None if self.style == "rowwise" else self.bias
        # A weight whose gradient is deferred is kept out of the graph, so that no hook of its runs
        # without a gradient; the backward pass comes here all the same if x has a gradient.
        deferred = self.deferred is not None and x.requires_grad
        weight = self.weight.detach() if deferred else self.weight
        bias = None if at_once is None else lowered(at_once)
        y: Tensor = _Linear.apply(lowered(x), lowered(weight), bias, self)
        return y if later is None else y + later.to(y.dtype)
