"""Chooses which parameters are trained, as section `finetune` says, and freezes the others."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from hpc_train.config import FinetuneSection
from hpc_train.errors import ConfigError, plural
from hpc_train.models.lora import LoraAdapters, is_adapter, linear_layers
from hpc_train.parallel.tensor import matching

logger = logging.getLogger(__name__)


def choose_trained(
    model: nn.Module, section: FinetuneSection, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give a model its adapters, and freeze what is not trained. All ranks must call it alike.

    Args:
        model: the whole model. It is changed in place.
        section: if it is not active, the model stays as it is.
        seed: the seed of adapters, for a model without a seed of its own.

    Returns:
        What a resumed run must have in common with this one, by configuration key; and what the
        readers of a checkpoint need, as plain JSON values.

    Raises:
        ConfigError: a pattern matches nothing, the model has no head or no linear layer, or a layer
            is to be trained in two ways.
    """
    if not section.active:
        return {}, {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stages = [
        n for one in getattr(model, "stages", None) or () for n in matching(model, one, "stages")
    ]
    trained = set(_matched(parameters, section.patterns, "finetune.patterns", "parameter"))
    if section.head:
        if not stages:
            raise ConfigError(
                f"finetune.head is true, but {type(model).__name__} does not say what its head is",
                "name its modules in an attribute `stages`, the head last: docs/how-to/parallel.md",
            )
        trained |= {name for name in parameters if name.startswith(f"{stages[-1]}.")}
    adapters, about = _adapters(model, section, stages), {}
    chosen = {id(parameters[name]) for name in trained}
    for parameter in parameters.values():
        parameter.requires_grad_(id(parameter) in chosen)
    if adapters is not None:
        for name in adapters.layers:
            weight = parameters[f"{name}.weight"]
            if tied := [n for n, p in parameters.items() if p is weight and n != f"{name}.weight"]:
                raise ConfigError(
                    f"{name} shares its weight with {tied[0].removesuffix('.weight')}, so an "
                    "adapter could not be merged into it",
                    "leave it out of finetune.lora_layers",
                )
            if weight.requires_grad:
                raise ConfigError(
                    f"{name} gets an adapter, but its weight itself is trained, too",
                    "leave it out of finetune.lora_layers, or out of what else is trained",
                )
        adapters.add_to(model, seed)
        about = adapters.about
    _tell(model, adapters)
    identity = {f"finetune.{key}": value for key, value in asdict(section).items()}
    return identity, about


def _adapters(
    model: nn.Module, section: FinetuneSection, stages: Sequence[str]
) -> LoraAdapters | None:
    """The adapters that the section asks for."""
    if not section.lora:
        return None
    known = linear_layers(model)
    ends = tuple(f"{name}." for name in (*stages[:1], *stages[-1:]))
    inside = [name for name in known if not f"{name}.".startswith(ends)] if ends else list(known)
    if section.lora_layers:
        inside = _matched(known, section.lora_layers, "finetune.lora_layers", "linear layer")
    if not inside:
        raise ConfigError(
            f"finetune.lora is {section.lora}, but {type(model).__name__} has no linear layer "
            "between its first stage and its head",
            f"give finetune.lora_layers, such as {', '.join([*known][:1])}"
            if known
            else "leave it out",
        )
    return LoraAdapters(rank=section.lora, alpha=section.alpha or section.lora, layers=inside)


def _matched(names: Iterable[str], patterns: Sequence[str], key: str, what: str) -> list[str]:
    """The names that a pattern matches, in their order.

    Raises:
        ConfigError: a pattern matches none.
    """
    names = list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            shown = f"; the first ones are {', '.join(names[:3])}" if names else ""
            raise ConfigError(
                f"{key}: the model has no {what} {pattern}{shown}", "name it as there"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, one) for one in patterns)]


def _tell(model: nn.Module, adapters: LoraAdapters | None) -> None:
    named = dict(model.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    count = sum(named[name].numel() for name in trained)
    total = sum(parameter.numel() for parameter in named.values())
    others = [name for name in trained if not is_adapter(name)]
    told = (
        [f"{plural(len(adapters.layers), 'adapter')} of rank {adapters.rank}"] if adapters else []
    )
    if others:
        told.append(
            f"{plural(len(others), 'tensor')}, {', '.join(others[:3])}"
            + ", ..." * (len(others) > 3)
        )
    logger.info("%d of %d parameters are trained: %s", count, total, " and ".join(told))
