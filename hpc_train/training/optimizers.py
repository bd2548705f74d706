"""Build the optimizer that a configuration asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hpc_train.config import OptimizerSection

ADAM_BETAS = (0.9, 0.95)
SGD_MOMENTUM = 0.9


def build_optimizer(model: nn.Module, section: OptimizerSection) -> Optimizer:
    """Build the optimizer of the model's parameters that require gradients.

    Weight decay applies to matrices only, not to biases, norms and other vectors. A module whose
    vectors are stacked, such as those of an ensemble's members, has their names in an attribute
    `stacked_vectors`. The part of a model that a rank has may have no such parameter.
    """
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
    if section.name == "sgd":
        return _lean(SGD)(groups, lr=section.lr, momentum=SGD_MOMENTUM, fused=True)
    return _lean(AdamW)(groups, lr=section.lr, betas=ADAM_BETAS, fused=True)


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
