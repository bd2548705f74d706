"""Build the optimizer that a configuration asks for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hpc_train.config import OptimizerSection
from hpc_train.errors import plural
from hpc_train.gradients.buckets import is_dense

logger = logging.getLogger(__name__)

ADAM_BETAS = (0.9, 0.95)
SGD_MOMENTUM = 0.9


def build_optimizer(model: nn.Module, section: OptimizerSection) -> Optimizer:
    """Build the optimizer of the model's parameters that require gradients.

    Weight decay applies to matrices only, not to biases, norms and other vectors. A module whose
    vectors are stacked, such as those of an ensemble's members, has their names in an attribute
    `stacked_vectors`. The part of a model that a rank has may have no such parameter.

    Layers whose gradients are sparse make dense ones from now on, because these optimizers need
    them. On several ranks gradients are dense anyway.
    """
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stacked = {
        id(getattr(module, name))
        for module in model.modules()
        for name in getattr(module, "stacked_vectors", ())
    }

    def decays(parameter: nn.Parameter) -> bool:
        return parameter.dim() >= 2 and id(parameter) not in stacked

    groups = [
        {"params": [p for p in trained if decays(p)], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if not decays(p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]] or groups[:1]
    # torch's fused kinds ignore strides, and so gaps in memory, and take no complex numbers.
    fused = all(is_dense(p) and not p.is_complex() for p in trained)
    if section.name == "sgd":
        return _lean(SGD)(groups, lr=section.lr, momentum=SGD_MOMENTUM, fused=fused)
    return _lean(AdamW)(groups, lr=section.lr, betas=ADAM_BETAS, fused=fused)


class Frozen:
    """The parameters that are not trained, because they were frozen when training was set up.

    Args:
        model: this rank's part of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._left = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]

    def look(self) -> None:
        """Warn once of each that requires gradients by now. It takes no time on the device."""
        if thawed := [name for name, parameter in self._left if parameter.requires_grad]:
            self._left = [one for one in self._left if not one[1].requires_grad]
            logger.warning(
                "no optimizer has %s of the model that came frozen, such as %s: unfreeze what is "
                "to be trained before the Trainer is made",
                plural(len(thawed), "parameter"),
                thawed[0],
            )


def set_precision(model: nn.Module, real: torch.dtype) -> None:
    """Give a model's floating-point numbers a dtype, and its complex ones the matching dtype.

    `model.to(dtype)` would drop the imaginary parts.
    """
    beside = real.to_complex()

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(beside)
        return tensor.to(real) if tensor.is_floating_point() else tensor

    model._apply(converted)


class SGD(torch.optim.SGD):
    """torch's SGD, in which a parameter may get its first gradient later than others.

    torch's fused step takes momenta of all parameters or of none.
    """

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        momentum_buffer_list: list[Tensor | None],
    ) -> bool:
        is_sparse: bool = super()._init_group(group, params, grads, momentum_buffer_list)
        if any(momentum is not None for momentum in momentum_buffer_list):
            momentum_buffer_list[:] = [
                torch.zeros_like(parameter) if momentum is None else momentum
                for parameter, momentum in zip(params, momentum_buffer_list, strict=True)
            ]
        return is_sparse


def _lean(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """Make an optimizer class that does not load torch.compile, but is otherwise the same.

    torch.compile takes as long to load as torch itself. torch wraps each optimizer method to keep
    it out of compilation, and the wrapper imports torch._dynamo on first use (torch/_compile.py).
    Setting the wrapper's marker avoids the import. `step` imports it for a graph break
    (torch/optim/optimizer.py), so `step` is unwrapped.
    """
    for method in vars(Optimizer).values():
        if plain := getattr(method, "__wrapped__", None):
            vars(plain).setdefault("__dynamo_disable", plain)
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(inspect.unwrap(kind.step))})
