"""Counts a model's floating-point operations: those of the matrix products of a training step.

These are the model FLOPs of Chowdhery et al., "PaLM", https://arxiv.org/abs/2204.02311, appendix B:
what the forward and the backward pass need, without what is computed again to save memory.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hpc_train.models import linear
from hpc_train.models.lora import is_adapter
from hpc_train.models.shape import Shape
from hpc_train.parallel.tensor import matching

logger = logging.getLogger(__name__)


def sample_flops(shape: Shape, model: nn.Module) -> float:
    """The operations of a sample's forward and backward pass, on all ranks of a replica.

    A product has one operation forward, and two backward: one for the gradient of its input, one
    for that of its matrix. What is frozen has fewer. No gradient of an input is needed before the
    first part that is trained, and none of a matrix that is not. Adapters come on top.

    Args:
        shape: the sizes of the model.
        model: the whole model, whose attribute `stages` names its parts. It is known which of its
            parameters are trained.
    """
    parts = shape.parts()
    names = [name for stage in model.stages for name in matching(model, stage, "stages")]  # type: ignore[union-attr]
    total, flowing = 0.0, False
    for number, (part, name) in enumerate(zip(parts, names, strict=True)):
        inside = 0 < number < len(parts) - 1
        products = part.flops  # those with matrices that are parameters
        if inside:
            products = min(products, 2.0 * shape.tokens * part.weights)
        rows = products / (2 * part.weights) if part.weights else 0.0
        module = model.get_submodule(name)
        mine = dict(module.named_parameters())
        matrices = [p for n, p in mine.items() if p.dim() > 1 and not is_adapter(n)]
        count = sum(p.numel() for p in matrices)
        share = sum(p.numel() for p in matrices if p.requires_grad) / count if count else 1.0
        adapters = sum(p.numel() for n, p in mine.items() if is_adapter(n))
        flowing = flowing or any(p.requires_grad for p in mine.values())
        others = part.flops - products  # those of activations with each other
        total += part.flops + share * products + 6 * rows * adapters
        if flowing:
            total += products + 2 * others
    return total


class UncountedError(Exception):
    """The operations of a module cannot be counted; the message says why."""


def counted_flops(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> float:
    """The operations of a module's forward and backward pass, counted without computing.

    A copy of the module runs on tensors that have shapes and no numbers, so nothing is changed and
    no memory is taken.

    Args:
        loss: the loss of a model and a batch.
        model: the module.
        batch: one batch.

    Raises:
        UncountedError: the module needs the numbers, cannot be copied, or has no products.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    before, errors = linear.used(), logging.getLogger("torch._subclasses.fake_tensor")
    told, errors.disabled = errors.disabled, True  # the message of the exception is enough
    try:
        linear.use("torch")  # whose products are known to the counter
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*model.parameters(), *model.buffers()]
        copied = copy.deepcopy(model, {id(one): fake.from_tensor(one) for one in tensors})
        data = tree_map(lambda x: fake.from_tensor(x) if isinstance(x, Tensor) else x, batch)
        trained = [p for p in copied.parameters() if p.requires_grad]
        with fake, torch.enable_grad(), FlopCounterMode(display=False) as counter:
            torch.autograd.grad(loss(copied, data), trained, allow_unused=True)
        count = counter.get_total_flops()
    except Exception as error:  # a user's module may do anything
        raise UncountedError(f"{type(error).__name__}: {error}") from error
    finally:
        linear.use(before)
        errors.disabled = told
    if not count:
        raise UncountedError("it has no matrix products")
    return float(count)
