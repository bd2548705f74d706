"""Broadcasts the optimizer's state from rank 0, or averages it over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import Collectives
from hpc_train.mpi.agreement import same


class Blank(NamedTuple):
    """Describes a tensor of the optimizer's state, so that other ranks can allocate it.

    Args:
        shape: its shape.
        dtype: its dtype.
        beside: whether it is on its parameter's device; otherwise it is on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    beside: bool

    def filled(self, parameter: Parameter) -> Tensor:
        """A tensor of zeros for it, with its parameter's strides if it has its shape.

        Fused optimizers go through the memory of both at once.
        """
        device = parameter.device if self.beside else torch.device("cpu")
        if self.shape == tuple(parameter.shape):
            return torch.zeros_like(parameter.detach(), dtype=self.dtype, device=device)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def broadcast_state(optimizer: Optimizer, collectives: Collectives) -> None:
    """Give all ranks the state and the settings of rank 0's optimizer. Collective.

    This is needed if only rank 0 has read a state from a file, or if ranks were given different
    settings, such as learning rates.

    Raises:
        UserError: the optimizers have parameters of different shapes or in different groups.
    """
    group = collectives.group
    if group.comm is None:
        return
    shapes = [[tuple(p.shape) for p in some["params"]] for some in optimizer.param_groups]
    same(group, "the optimizer (its groups of parameters)", repr(shapes), "build the same")
    settings, states = group.from_first(lambda: (_settings(optimizer), _outline(optimizer)))
    for mine, first in zip(optimizer.param_groups, settings, strict=True):
        mine.update(first)
    for parameter, slots in zip(_parameters(optimizer), states, strict=True):
        if group.rank:
            optimizer.state.pop(parameter, None)
        for name, value in slots.items():
            _receive(optimizer, parameter, name, value, collectives)


def average_state(optimizer: Optimizer, collectives: Collectives) -> None:
    """Replace the optimizer's moments (see `moments`) by their mean over the ranks. Collective.

    All ranks must have moments for the same parameters.
    """
    for slot in moments(optimizer).values():
        for moment in slot.values():
            collectives.sum_(moment)
            moment.div_(collectives.group.size)


def moments(optimizer: Optimizer) -> dict[str, dict[Parameter, Tensor]]:
    """The moments: tensors of the state that have their parameter's shape, in floating point.

    Returns:
        For each name in the state, the moment of each parameter; in the same order on all ranks.
    """
    found: dict[str, dict[Parameter, Tensor]] = {}
    for parameter in _parameters(optimizer):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if alike and value.is_floating_point():
                found.setdefault(name, {})[parameter] = value
    return found


def _parameters(optimizer: Optimizer) -> Iterator[Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _outline(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The state of each parameter by name, with a `Blank` in place of each tensor."""
    return [
        {
            name: Blank(tuple(value.shape), value.dtype, value.device == parameter.device)
            if isinstance(value, Tensor)
            else value
            for name, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in _parameters(optimizer)
    ]


def _receive(
    optimizer: Optimizer, parameter: Parameter, name: str, value: Any, collectives: Collectives
) -> None:
    """Take over one value of rank 0's state. Collective."""
    state = optimizer.state[parameter]
    if collectives.group.rank:
        state[name] = value.filled(parameter) if isinstance(value, Blank) else value
    if isinstance(value, Blank):
        collectives.broadcast_(state[name])
