"""Batch normalization over the samples of all ranks, with the results of a single process.

A BatchNorm layer takes mean and variance over the samples that it sees. On several ranks each layer
would see only its rank's samples. Here the ranks add up their sums in the forward pass, and the
sums for the gradients in the backward pass. This takes two small collectives for each layer and
micro-batch. The method is from Ioffe and Szegedy, "Batch normalization",
https://arxiv.org/abs/1502.03167; the gradients are in its section 3.
"""

from __future__ import annotations

import copyreg
import functools
import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hpc_train.collectives import Collectives
from hpc_train.collectives.regions import check_no_transform
from hpc_train.errors import UserError

logger = logging.getLogger(__name__)

BatchNorm = Literal["sync", "local", "refuse"]
"""How BatchNorm layers are treated on several ranks: see `set_up_batch_norm`."""


def set_up_batch_norm(model: nn.Module, over: Collectives, batch_norm: BatchNorm) -> None:
    """Set up a model's BatchNorm layers for training on several ranks. Collective.

    Rank 0 logs which layers mix samples, and which dropout layers draw different masks when the
    number of ranks changes.

    Args:
        model: its layers are changed in place. `release` undoes it.
        over: the ranks that share a batch.
        batch_norm: "sync" takes the statistics over all ranks' samples, as one process would.
            "local" lets each rank take its own; `average_statistics` then averages the running
            statistics. "refuse" raises an error if the model has such layers.

    Raises:
        UserError: the model has BatchNorm layers and `batch_norm` is "refuse", or it has torch's
            own SyncBatchNorm, which needs torch.distributed.
    """
    group = over.group
    if group.size == 1:
        return
    named = dict(model.named_modules())
    layers: dict[str, Any] = {
        name: module for name, module in named.items() if isinstance(module, _BatchNorm)
    }
    foreign = [name for name, module in layers.items() if isinstance(module, nn.SyncBatchNorm)]
    if foreign:
        raise UserError(
            f"{foreign[0]} is torch's SyncBatchNorm, which needs torch.distributed",
            'use BatchNorm: batch_norm "sync" takes its statistics over all ranks',
        )
    if layers and batch_norm == "refuse":
        raise UserError(
            f"{next(iter(layers))} is a BatchNorm layer, and batch_norm is refuse",
            'use another norm, or batch_norm "sync" or "local"',
        )
    if batch_norm == "sync":
        width = 1 + 2 * max((module.num_features for module in layers.values()), default=0)
        for number, (name, module) in enumerate(layers.items()):
            kind: Any = type(module)
            if not isinstance(module, _Synchronized):
                module.__class__ = _over_ranks(kind)
            module.sums_over_ranks = _Sums(over, name, number, width)
    if group.rank == 0:
        _tell(named, layers, batch_norm)


def _tell(named: dict[str, nn.Module], layers: dict[str, Any], batch_norm: BatchNorm) -> None:
    layers = {name: layer for name, layer in layers.items() if not _is_frozen(layer, named[""])}
    if layers:
        whose = "those of all ranks' samples" if batch_norm == "sync" else "each rank's own"
        logger.info(
            "batch_norm %s: its statistics are %s (layer %s, %d in all)",
            batch_norm,
            whose,
            next(iter(layers)),
            len(layers),
        )
    drawing = [
        name
        for name, module in named.items()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and module.training
    ]
    if drawing:
        logger.info(
            "each rank draws its own dropout masks (layer %s, %d in all), "
            "which depend on the number of ranks",
            drawing[0],
            len(drawing),
        )


def _is_frozen(layer: nn.Module, model: nn.Module) -> bool:
    """Whether a layer stays as it is. A model that is in eval mode as a whole is trained later."""
    trained = any(parameter.requires_grad for parameter in layer.parameters())
    return model.training and not layer.training and not trained


def average_statistics(model: nn.Module, over: Collectives) -> None:
    """Average the running statistics that each rank has taken by itself. Collective."""
    if over.group.size == 1:
        return
    for module in model.modules():
        if isinstance(module, _NormBase) and not isinstance(module, _Synchronized):
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None:
                    over.sum_(buffer)
                    buffer.div_(over.group.size)


def release(model: nn.Module, over: Collectives) -> None:
    """Make the layers that `set_up_batch_norm` has changed for these ranks plain again."""
    for module in model.modules():
        if isinstance(module, _Synchronized) and module.sums_over_ranks.over is over:
            module.__class__ = module.plain
            del module.sums_over_ranks


class _Synchronized:
    """A mixin that takes a BatchNorm layer's statistics over all ranks.

    Only the class of the layer is changed, so its name and its tensors stay, and `isinstance`
    still works. A copy or a pickle of the layer is plain. This class comes directly before torch's
    own, so that a subclass of the user gets here by `super().forward`.
    """

    plain: ClassVar[type[Any]]
    sums_over_ranks: _Sums

    def forward(self: Any, x: Tensor) -> Tensor:
        if not self.training:
            result: Tensor = super().forward(x)  # type: ignore[misc]
            return result
        sums = self.sums_over_ranks
        sums.reached = True
        self._check_input_dim(x)
        check_no_transform(
            f"BatchNorm layer {sums.name}",
            'compute gradients by torch.autograd.grad, or set batch_norm to "local"',
        )
        mean, var, count = _statistics(x, self.running_mean, sums)
        if self.track_running_stats and self.running_mean is not None:
            self.num_batches_tracked.add_(1)
            rate = self.momentum
            if rate is None:
                rate = 1.0 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), rate)
        normalized: Tensor = _Normalize.apply(
            x, self.weight, self.bias, mean, var, count, self.eps, sums
        )
        return normalized

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "sums_over_ranks"}
        return copyreg.__newobj__, (self.plain,), state  # type: ignore[attr-defined]


def has_synchronized(model: nn.Module) -> bool:
    """Whether a model has layers that add up their statistics over the ranks."""
    return any(isinstance(module, _Synchronized) for module in model.modules())


FORWARD, BACKWARD, AGAIN, SECOND = range(4)
"""What ranks add up: statistics, sums for gradients, the statistics again with create_graph, and
sums for second derivatives."""


@dataclass
class _Sums:
    """Adds up what a layer has computed on each rank.

    Args:
        over: the ranks.
        name: the layer's name in the model.
        number: its number among the layers that are synchronized.
        width: the most values of such a layer. All send as many, so that ranks in different layers
            end with an error, and not with each other's values or in a wait.
        reached: whether the layer has asked for sums yet.
    """

    over: Collectives
    name: str
    number: int
    width: int
    reached: bool = field(default=False, init=False)

    def add(self, values: Tensor, kind: int) -> Tensor:
        """Add up values over the ranks. Collective.

        Args:
            values: float64, at most `width`.
            kind: FORWARD, BACKWARD, AGAIN or SECOND.

        Raises:
            UserError: the ranks compute different layers; on all of them.
        """
        call = 4 * self.number + kind + 1
        head = values.new_tensor([call, call * call])
        sums = torch.cat([head, values, values.new_zeros(max(0, self.width - len(values)))])
        self.over.sum_(sums)
        size = self.over.group.size
        # The mean and the mean square of numbers are those of one of them only if all are the same.
        if sums[:2].tolist() != [size * call, size * call * call]:
            error = UserError(
                f"the ranks do not all compute BatchNorm layer {self.name} at the same time",
                "call the same layers in the same order on all ranks, also with an empty batch; "
                "or call model.eval() first if one rank evaluates alone; or set batch_norm to "
                '"local"',
            )
            error.agreed = True
            raise error
        return sums[2 : 2 + len(values)]


@functools.cache
def _over_ranks(plain: Any) -> Any:
    """The class of a layer that was of class `plain`. Layers of one class still have one class."""
    torchs = next(one for one in plain.__mro__ if one.__module__ == _BatchNorm.__module__)
    ours = type(torchs.__name__, (_Synchronized, torchs), {})
    bases = (ours,) if plain is torchs else (plain, ours)

    def forward(self: Any, *args: Any, **how: Any) -> Any:
        if not isinstance(self, whole):  # `release` came, and a wrapper has kept this method
            return type(self).forward(self, *args, **how)
        sums, mean = self.sums_over_ranks, self.running_mean
        unsure = self.training and not sums.reached and mean is not None
        before = mean.clone() if unsure else None
        result = super(whole, self).forward(*args, **how)
        # A frozen layer uses its running statistics, and leaves them.
        frozen = before is not None and torch.equal(before, mean)
        if self.training and not sums.reached and not frozen:
            raise UserError(
                f"BatchNorm layer {sums.name}, a {plain.__name__}, takes its statistics by itself, "
                "so from its own rank's samples only",
                'let its forward call super().forward, or set batch_norm to "local"',
            )
        return result

    # torch.compile would look into the sums over the ranks.
    own = {"plain": plain, "forward": torch.compiler.disable(forward)}
    whole: Any = type(plain.__name__, bases, own)
    return whole


def _statistics(x: Tensor, about: Tensor | None, over: _Sums) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance of each channel, (C,) each, and the number of values per channel.

    All three are taken over all ranks.

    Args:
        x: (B, C, ...).
        about: a guess of the mean, the same on all ranks. Sums are taken of the differences from
            it, because the variance then loses less to rounding.
        over: adds up over the ranks. A rank may have no samples.

    Raises:
        ValueError: there is only one value per channel, which has no variance.
        UserError: the ranks compute different layers.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    count = x.numel() / max(x.shape[1], 1)
    if count:
        var, mean = torch.var_mean(x.detach().to(wide), _but_channels(x), correction=0)
    else:
        var = mean = x.new_zeros(x.shape[1], dtype=wide)
    shift = 0.0 if about is None else about.double()
    far = mean.double() - shift
    number = torch.full((1,), count, dtype=torch.float64, device=x.device)
    values = torch.cat([number, count * far, count * (var.double() + far.square())])
    sums = over.add(values, FORWARD)
    total = float(sums[0])
    if total <= 1:
        raise ValueError(
            f"batch normalization of one value per channel in training (input {list(x.shape)})"
        )
    first, second = (sums[1:] / total).chunk(2)
    return (first + shift).to(wide), (second - first.square()).clamp_(min=0).to(wide), total


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, with statistics that depend on all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: float,
        eps: float,
        over: _Sums,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.count, ctx.eps, ctx.over = count, eps, over
        weight, bias = (one if one is None else one.to(mean.dtype) for one in (weight, bias))
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        shape = [1, -1, *[1] * (x.dim() - 2)]
        if torch.is_grad_enabled():  # create_graph: x changes the gradient by its statistics, too
            far = x - mean.view(shape)
            _, (first, second) = _sums_and_means(ctx, AGAIN, far, far.square())
            mean, scale = mean + first, (second - first.square() + ctx.eps).rsqrt()
        wide = dy.to(mean.dtype)
        normal = (x - mean.view(shape)) * scale.view(shape)  # (B, C, ...)
        (d_bias, d_weight), (mean_dy, mean_product) = _sums_and_means(
            ctx, BACKWARD, wide, wide * normal
        )
        dx = wide - mean_dy.view(shape) - normal * mean_product.view(shape)
        by = scale if weight is None else scale * weight
        dx = (dx * by.view(shape)).to(x.dtype)
        needs = ctx.needs_input_grad
        return (
            dx,
            d_weight.to(weight.dtype) if needs[1] else None,
            d_bias.to(weight.dtype) if needs[2] else None,
            *[None] * 5,
        )


def _sums_and_means(ctx: Any, kind: int, *values: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of each channel over this rank's values, and the means over all ranks' values."""
    sums = torch.stack([value.sum(_but_channels(value)) for value in values])
    total = _SumBackward.apply(sums.double().flatten(), ctx.over, kind).view_as(sums)
    return sums, (total / ctx.count).to(sums.dtype)


class _SumBackward(torch.autograd.Function):
    """Adds up what the ranks have in a backward pass. The gradient of that is such a sum, too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, over: _Sums, kind: int) -> Tensor:
        ctx.over = over
        return over.add(values, kind)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _SumBackward.apply(dy, ctx.over, SECOND), None, None


def _but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
