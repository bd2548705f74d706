"""Linear layers that the ranks of a tensor-parallel group share.

The method is from Shoeybi et al., "Megatron-LM: training multi-billion parameter language models
using model parallelism", https://arxiv.org/abs/1909.08053, section 3. In a column-parallel layer
each rank holds rows of the weight (N, K), and computes its part of the outputs from the whole
input. In a row-parallel layer each rank holds columns and takes its part of the inputs, and the
ranks' results are summed. With sequence parallelism the tensors outside of such a pair are cut
along the tokens (dimension 1). The sum then becomes a reduce-scatter, and the input is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from hpc_train.collectives import Collectives
from hpc_train.errors import UserError
from hpc_train.models.initial import LORA_A, LORA_B
from hpc_train.models.kept import kept
from hpc_train.models.linear import lowered, product
from hpc_train.models.lora import Adapter

TOKENS = 1  # the dimension that sequence parallelism cuts


class Deferred:
    """Weight gradients that a backward pass leaves for later (zero-bubble schedules)."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Parameter, Callable[[], Tensor]]] = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context for a forward pass. Backward passes inside of it leave nothing."""
        count = len(self.waiting)
        try:
            yield
        finally:
            del self.waiting[count:]

    def take(self) -> list[tuple[Parameter, Callable[[], Tensor]]]:
        """The weight gradients that were left since the last call."""
        waiting, self.waiting = self.waiting, []
        return waiting


def compute(deferred: list[tuple[Parameter, Callable[[], Tensor]]]) -> None:
    """Compute weight gradients that were left for later, and add them as a backward pass would."""
    gradients: dict[Parameter, Tensor] = {}
    for parameter, gradient in deferred:
        known = gradients.get(parameter)
        gradients[parameter] = gradient() if known is None else known.add_(gradient())
    for parameter, total in gradients.items():
        parameter.backward(total)  # `grad +=` would not run the hooks


class _Linear(torch.autograd.Function):
    """y = x W^T for x (..., K). It gathers its input or sums its output over the layer's ranks.

    Gather, product and sum are one function, so that the sum works in place on the product's
    result, and so that communication goes on while the weight's gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        layer: ParallelLinear,
    ) -> Tensor:
        ctx.layer, ctx.has_bias = layer, bias is not None
        # A frozen weight has no gradient, so its input need not be kept, and gathered again.
        again = layer.weight.requires_grad or a is not None
        ctx.save_for_backward(x if again else None, weight, a, b)
        ctx.shape = list(x.shape)
        if layer.gathers:
            ctx.shape[TOKENS] *= layer.over.group.size
        # The sum is kept. So a pass that is repeated with kept results does not communicate.
        return kept(lambda: layer.product(x, weight, bias, a, b))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer: ParallelLinear = ctx.layer
        x, weight, a, b = ctx.saved_tensors
        # Only this rank's part of a gathered input was kept. The rest arrives while dx is computed.
        gathers = layer.gathers and x is not None
        gathering = layer.over.start_gather(x, TOKENS) if gathers else None
        if layer.style == "rowwise" and layer.cut:
            dy = layer.over.start_gather(dy.contiguous(), TOKENS).wait()
        flat = dy.reshape(-1, dy.shape[-1])
        dx = product(flat, weight.t()) if ctx.needs_input_grad[0] else None
        dlow = product(flat, b.t()).mul_(layer.scale) if b is not None else None
        if dx is not None:
            if dlow is not None:
                dx = dx.add_(product(dlow, a.t()))
            dx = dx.view(ctx.shape)
        if gathering is not None:
            x = gathering.wait()
        summing = None
        if dx is not None and layer.style == "colwise":  # the sum goes on during dweight below
            over = layer.over
            summing = over.start_sum_scatter(dx, TOKENS) if layer.cut else over.start_sum_(dx)

        def dweight() -> Tensor:
            found = product(flat.t(), x.reshape(-1, x.shape[-1]).t())
            return found.to(layer.weight.dtype)  # `compute` adds others to it, of the same type

        found = dweight() if ctx.needs_input_grad[1] else None
        if found is None and layer.deferred is not None and layer.weight.requires_grad:
            layer.deferred.waiting.append((layer.weight, dweight))
        da = db = None
        if dlow is not None:
            wide = x.reshape(-1, x.shape[-1])
            da = product(dlow.t(), wide.t())
            db = product(flat.t(), product(wide, a).t()).mul_(layer.scale)
        dbias = flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return summing.wait() if summing is not None else dx, found, dbias, da, db, None


class ParallelLinear(nn.Module):
    """A linear layer, or this rank's part of one.

    It has the attributes and the parameters' names of torch's. `in_features` and `out_features` are
    the whole layer's: a wrong shape is seen, where a scale that follows from a part would not be.

    Args:
        weight: this rank's part of the weight (N, K): its rows for style colwise, its columns for
            style rowwise, all of it for style whole.
        bias: this rank's elements (N) for style colwise, all of them for the other styles, or None.
        style: how the ranks share the layer; "whole" does not share it.
        over: the tensor-parallel group.
        cut: whether the tensors outside of a colwise and rowwise pair are cut along the tokens.
        deferred: takes the weight gradients, to be computed later. None computes them at once.
        adapter: the layer's adapter, if it has one. For style colwise it has this rank's rows of B
            (N, R), for style rowwise this rank's columns of A (R, K).
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
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__()
        parts = over.group.size
        self.out_features = weight.shape[0] * (parts if style == "colwise" else 1)
        self.in_features = weight.shape[1] * (parts if style == "rowwise" else 1)
        self.weight = weight
        self.bias: Parameter | None
        self.register_parameter("bias", bias)
        self.style, self.over, self.cut, self.deferred = style, over, cut, deferred
        self.lora_a: Parameter | None
        self.lora_b: Parameter | None
        self.register_parameter(LORA_A, adapter.a if adapter else None)
        self.register_parameter(LORA_B, adapter.b if adapter else None)
        self.scale = adapter.scale if adapter else 0.0

    @property
    def partial(self) -> list[Parameter]:
        """Whole parameters of the adapter, of whose gradients each rank computes a part.

        Each rank sees only its part of the outputs of A, or of the inputs of B. The parts have to
        be summed over the ranks.
        """
        whole = {"colwise": self.lora_a, "rowwise": self.lora_b}.get(self.style)
        return [whole] if whole is not None and self.over.group.size > 1 else []

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None = None,
        b: Tensor | None = None,
    ) -> Tensor:
        """The layer's result, gathered before and summed after as the style says. Collective."""
        if self.gathers:
            x = self.over.start_gather(x, TOKENS).wait()
        wide = x.reshape(-1, x.shape[-1])
        flat = product(wide, weight, bias)
        if a is not None and b is not None:
            flat.add_(product(product(wide, a), b), alpha=self.scale)
        # Autograd refuses to change a function's result in place if it is a view.
        y: Tensor = torch.ops.aten._unsafe_view(flat, [*x.shape[:-1], weight.shape[0]])
        if self.style == "rowwise":
            if self.cut:
                return self.over.start_sum_scatter(y, TOKENS).wait()
            self.over.sum_(y)
        return y

    @property
    def gathers(self) -> bool:
        """Whether the input has to be gathered, as it is cut along the tokens."""
        return self.cut and self.style == "colwise"

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Transform an input of shape (..., K) to (..., N). Collective over the tensor group.

        For style rowwise K counts this rank's inputs, for style colwise N counts its outputs. Under
        `torch.autocast` the ranks compute and exchange tensors of autocast's type.

        Raises:
            UserError: the input has another width.
        """
        if self.style != "whole" and input.shape[-1] != self.weight.shape[1]:
            raise UserError(
                f"a {self.style} Linear({self.in_features}, {self.out_features}) takes "
                f"{self.weight.shape[1]} features on each rank, and gets {list(input.shape)}",
                "a rank has its part of what a colwise layer returns, and a rowwise layer takes "
                "it; take sizes from it, as in `q = self.q(x)`, "
                "`q.view(*q.shape[:2], -1, head_size)`",
            )
        later = self.bias if self.style == "rowwise" else None  # added once, to the sum
        at_once = None if self.style == "rowwise" else self.bias
        # A weight whose gradient is deferred is kept out of the graph: otherwise its hooks would
        # run without a gradient. The backward pass still gets here, as the input needs a gradient.
        deferred = self.deferred is not None and input.requires_grad
        weight = self.weight.detach() if deferred else self.weight
        bias = None if at_once is None else lowered(at_once)
        a, b = (None if p is None else lowered(p) for p in (self.lora_a, self.lora_b))
        y: Tensor = _Linear.apply(lowered(input), lowered(weight), bias, a, b, self)
        return y if later is None else y + later.to(y.dtype)
