"""Finds tensors that lie in the memory of a parameter, and would stay behind if it moved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hpc_train.errors import UserError


def check_movable(model: nn.Module, moved: Collection[Parameter]) -> None:
    """Check that parameters can get other memory without parting from other tensors.

    Args:
        model: the model.
        moved: the parameters that get other memory.

    Raises:
        UserError: another tensor of the model lies in the memory of one of them, wholly or in part.
    """
    if found := overlap(model, moved):
        cause, remedy = found
        raise UserError(
            f"memory.zero moves parameters to shared memory, and {cause}",
            f"{remedy}, or leave memory.zero out",
        )


def overlap(model: nn.Module, moved: Iterable[Parameter]) -> tuple[str, str] | None:
    """A parameter and another tensor in its memory, as cause and remedy; None if there is none.

    Args:
        model: the model.
        moved: the parameters that are looked at.
    """
    wanted = {id(p): ("a parameter of the optimizer", p) for p in moved}
    names = wanted | {id(tensor): (name, tensor) for name, tensor in _tensors_in(model)}
    found = [(*_place(tensor), name, tensor) for name, tensor in names.values() if tensor.numel()]
    reach: dict[str, tuple[int, str, Tensor]] = {}  # of each device, what ends last
    for device, begin, end, name, tensor in sorted(found, key=lambda one: one[:3]):
        last, other, before = reach.get(device, (0, "", tensor))
        moves = id(tensor) in wanted or id(before) in wanted
        if begin < last and moves and not _is_left(name, other):
            return _told(other, before, name, tensor)
        if end > last:
            reach[device] = end, name, tensor
    return None


def _told(other: str, before: Tensor, name: str, tensor: Tensor) -> tuple[str, str]:
    cause = f"{name} and {other} of the model lie in the same memory"
    if isinstance(before, Parameter) and isinstance(tensor, Parameter):
        return cause, "tie parameters by one object (b.weight = a.weight, not by `.data`)"
    return cause, "make the view where it is used, or clone it"


def _tensors_in(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that modules have: parameters, buffers and others. Each has one name or more."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            several: dict[Any, Any] = {}
            if name in ("_parameters", "_buffers"):
                several = value
            elif isinstance(value, dict):
                several = {f"{name}[{key!r}]": one for key, one in value.items()}
            elif isinstance(value, (list, tuple)):
                several = {f"{name}[{number}]": one for number, one in enumerate(value)}
            for one_name, one in (several or {name: value}).items():
                if _has_memory(one):
                    yield f"{path}.{one_name}".removeprefix("."), one


def _has_memory(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_nested
        and bool(torch._C._has_storage(value))
    )


def _place(tensor: Tensor) -> tuple[str, int, int]:
    """The device, and the addresses where a tensor begins and ends."""
    begin = tensor.data_ptr()
    last = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return str(tensor.device), begin, begin + (last + 1) * tensor.itemsize


def _is_left(name: str, other: str) -> bool:
    """Whether torch itself leaves one tensor until it computes it anew before the forward pass.

    That is `weight` of torch.nn.utils.spectral_norm, which has the memory of `weight_orig`.
    """
    return name in (f"{other}_orig", other.removesuffix("_orig")) and name != other
