"""Low-rank adapters beside linear layers (LoRA), which are trained while the layers are frozen.

The method is from Hu et al., "LoRA: low-rank adaptation of large language models",
https://arxiv.org/abs/2106.09685. An adapter of rank R adds to a layer's result y = x W^T + b the
product S x A^T B^T, for x (..., K), W (N, K), A (R, K), B (N, R) and a constant S = alpha / R. B
begins as zeros, so an adapted layer begins as the layer itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hpc_train.models.deferred import Recipe, StridedPlace, is_unfilled, recipes_of, untouched
from hpc_train.models.hooks import has_hooks
from hpc_train.models.initial import LORA_A, LORA_B, InitialValues, made_at_once
from hpc_train.models.linear import Linear, linear

_ABOUT = "lora"  # the key of a checkpoint's `about` that has the adapters


class Adapter(NamedTuple):
    """The parameters of an adapter, or a rank's parts of them, and the constant S."""

    a: Parameter
    b: Parameter
    scale: float


class LoraLinear(Linear):
    """A linear layer with an adapter.

    Args:
        layer: the layer, whose parameters it takes over.
        rank: rank R of the adapter, whose parameters have no values yet.
        scale: the constant S.
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.scale = layer.weight, scale
        self.register_parameter("bias", layer.bias)
        kind, device = layer.weight.dtype, layer.weight.device
        self.lora_a = Parameter(untouched([rank, layer.in_features], kind).to(device))
        self.lora_b = Parameter(untouched([layer.out_features, rank], kind).to(device))

    @property
    def adapter(self) -> Adapter:
        """The adapter."""
        return Adapter(self.lora_a, self.lora_b, self.scale)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Transform an input of shape (..., K) to (..., N)."""
        y = linear(input, self.weight, self.bias)
        return torch.add(y, linear(linear(input, self.lora_a), self.lora_b), alpha=self.scale)


def weight_of(layer: nn.Linear) -> Tensor:
    """The weight (N, K) with which a layer computes, for a model that computes with it itself."""
    weight: Tensor = layer.weight
    a, b = getattr(layer, LORA_A, None), getattr(layer, LORA_B, None)
    if a is None or b is None:
        return weight
    scale: float = layer.scale  # type: ignore[assignment]
    return torch.addmm(weight, b, a, alpha=scale)


@dataclass(frozen=True, kw_only=True)
class LoraAdapters:
    """The adapters of a model.

    Args:
        rank: rank R of each.
        alpha: the constant S is alpha / R.
        layers: names of the linear layers that have one.
    """

    rank: int
    alpha: float
    layers: Sequence[str]

    @property
    def scale(self) -> float:
        """The constant S."""
        return self.alpha / self.rank

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> LoraAdapters | None:
        """The adapters that a checkpoint's `about` tells of; None if it has none."""
        return cls(**about[_ABOUT]) if _ABOUT in about else None

    @property
    def about(self) -> dict[str, Any]:
        """What `of` reads back, as plain JSON values."""
        return {_ABOUT: asdict(self) | {"layers": list(self.layers)}}

    def add_to(self, model: nn.Module, seed: int = 0) -> None:
        """Replace the layers, in place, by such with adapters.

        Adapters of a model that has no values yet get theirs with all others.

        Args:
            model: the whole model.
            seed: the seed of A, for a model without a seed of its own (`initial.HasInitial`).
        """
        added: dict[str, Parameter] = {}
        # In eval mode torch's TransformerEncoderLayer would read the weights, past the adapters.
        torch.backends.mha.set_fastpath_enabled(False)
        for name in self.layers:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            adapted = LoraLinear(layer, self.rank, self.scale)
            model.set_submodule(name, adapted)
            added |= {f"{name}.{LORA_A}": adapted.lora_a, f"{name}.{LORA_B}": adapted.lora_b}
        own_seed = hasattr(model, "initial_seed")
        if own_seed and is_unfilled(model):  # what fills the model fills them
            recipes_of(model).update({name: _no_recipe(made) for name, made in added.items()})
            return
        values = InitialValues(model) if own_seed else None
        for name, made in added.items():
            if values is not None:
                values.fill(made, made.data)
            else:
                made_at_once(made.data, name, seed)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The weight (N, K) of a plain layer that computes what the adapted one does."""
        exact = torch.float64
        return weight.to(exact).addmm(b.to(exact), a.to(exact), alpha=self.scale).to(weight.dtype)


def _no_recipe(parameter: Parameter) -> Recipe:
    """What notes that a parameter has no values yet. `InitialValues` does not use more of it."""
    return Recipe(parameter.numel(), parameter.dtype, (), StridedPlace.of(parameter))


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's parameter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers of a model that can have an adapter, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if name and isinstance(layer, nn.Linear) and is_plain_linear(layer)
    }


def is_plain_linear(layer: nn.Linear) -> bool:
    """Whether a linear layer computes nothing else than such a layer of torch, by its own call.

    A layer with weight_norm or another parametrization computes its weight. `MultiheadAttention`
    reads the weights of its last layer, and never calls the layer.
    """
    return (
        type(layer).forward in (nn.Linear.forward, Linear.forward)
        and "weight" in layer._parameters
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
        and not has_hooks(layer)
    )
