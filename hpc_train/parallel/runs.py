"""A model's stage modules by name and cost, and the runs of them that pipeline ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from torch import nn
from torch.nn.modules.conv import _ConvNd

from hpc_train.errors import UserError
from hpc_train.parallel.divide import divide
from hpc_train.parallel.tensor import matching

COMPUTING = nn.Linear, _ConvNd, nn.RNNBase, nn.MultiheadAttention  # layers that take time


def stage_names(model: nn.Module) -> list[str]:
    """The names of a model's stage modules, in the order of its forward pass.

    Raises:
        UserError: the model has no stages, a stage lies inside another one, two are one module, or
            a parameter lies in none.
    """
    patterns = getattr(model, "stages", None)
    if not patterns:
        raise UserError(
            f"parallel.pp above 1 and memory.zero 3 need stages, and {type(model).__name__} has no "
            "attribute `stages`",
            "name its modules in the order of its forward pass: docs/how-to/parallel.md",
        )
    names = [name for pattern in patterns for name in matching(model, pattern, "stages")]
    _check_distinct(model, names)
    for outer, inner in permutations(names, 2):
        if f"{inner}.".startswith(f"{outer}."):
            raise UserError(f"stages: {inner} is part of {outer}", "name each module once")
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{stage}.") for stage in names):
            raise UserError(
                f"parameter {name} is in none of the model's stages", "add its module to `stages`"
            )
    return names


def _check_distinct(model: nn.Module, names: Sequence[str]) -> None:
    first: dict[nn.Module, str] = {}
    for name in names:
        other = first.setdefault(model.get_submodule(name), name)
        if other != name:
            raise UserError(
                f"stages: {other} and {name} are one module",
                "a module can be one stage only: give each stage a module of its own, or call "
                "the shared one inside one stage",
            )


def costs(model: nn.Module, names: Sequence[str]) -> list[float]:
    """The cost of each stage module: the elements of its layers' weights, or 1 if none has any.

    They are the weights of linear, convolutional, recurrent and attention layers, which are the
    parameters of these with two or more dimensions.
    """
    found = []
    for name in names:
        layers = [m for m in model.get_submodule(name).modules() if isinstance(m, COMPUTING)]
        own = [p for layer in layers for p in layer.parameters(recurse=False) if p.dim() > 1]
        found.append(float(sum(weight.numel() for weight in own)))
    return found if any(found) else [1.0] * len(found)


def runs_of(
    model: nn.Module, names: Sequence[str], ranks: int, virtual_stages: int
) -> list[list[range]]:
    """Divide the stage modules by cost over ranks and virtual stages.

    Run c * ranks + r is virtual stage c of rank r, as in Narayanan et al., "Efficient large-scale
    language model training on GPU clusters using Megatron-LM", https://arxiv.org/abs/2104.04473.

    Returns:
        For each pipeline rank a list with one run for each virtual stage, as positions in `names`.

    Raises:
        UserError: there are fewer modules than virtual stages.
    """
    parts = ranks * virtual_stages
    if len(names) < parts:
        of = f"{ranks} ranks" + (
            f" x {virtual_stages} virtual stages" if virtual_stages > 1 else ""
        )
        raise UserError(
            f"the model has {len(names)} stage modules, too few for {of} of a pipeline",
            f"parallel.pp x parallel.virtual_stages can be up to {len(names)}",
        )
    divided = divide(costs(model, names), parts)
    return [[divided[c * ranks + r] for c in range(virtual_stages)] for r in range(ranks)]
