"""Build the optimizer that a configuration asks for."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hpc_train.config import OptimizerSection

ADAM_BETAS = (0.9, 0.95)
SGD_MOMENTUM = 0.9


def build_optimizer(model: nn.Module, section: OptimizerSection) -> Optimizer:
    """An optimizer over the model's trained parameters.

    Weight decay is for matrices: biases, norms and other vectors have none.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        return SGD(groups, lr=section.lr, momentum=SGD_MOMENTUM, fused=True)
    return AdamW(groups, lr=section.lr, betas=ADAM_BETAS, fused=True)
