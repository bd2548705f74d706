"""Broadcasts the optimizer's state from rank 0, or replaces the ranks' states by their mean."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import Collectives
from hpc_train.mpi.agreement import same
from hpc_train.mpi.group import Group


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

    @classmethod
    def of(cls, value: Tensor, parameter: Parameter) -> Blank:
        """Describe a tensor of a parameter's state."""
        return cls(tuple(value.shape), value.dtype, value.device == parameter.device)

    def filled(self, parameter: Parameter) -> Tensor:
        """A tensor of zeros for it, with its parameter's strides if it has its shape.

        Fused optimizers go through the memory of both at once.
        """
        device = parameter.device if self.beside else torch.device("cpu")
        if self.shape == tuple(parameter.shape):
            return torch.zeros_like(parameter.detach(), dtype=self.dtype, device=device)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


class Counted(NamedTuple):
    """Describes a tensor of the state that is one number of the optimizer's own.

    Args:
        blank: describes the tensor.
        number: its value.
    """

    blank: Blank
    number: Any


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


def unite_state(optimizer: Optimizer, group: Group) -> list[Tensor]:
    """Give all ranks that have trained by themselves the same entries of state. Collective.

    A rank whose samples have not used a parameter has no state of it, or has taken fewer steps.
    Moments (see `moments`) and factors that it lacks become zeros, and are to be averaged over all
    ranks: a rank that does not use a parameter has the gradient 0 there, as it counts when
    gradients are averaged. So Adam's `exp_avg` and SGD's momentum, which are linear in the
    gradients, become those of the mean gradient, and `exp_avg_sq` the mean of all ranks' squares.
    SGD itself goes on from a momentum of zeros as from none. Numbers such as `step` become those of
    the rank that has taken most steps: fewer would make Adam's corrections, and so the next update,
    too large.

    Returns:
        The factors: real or complex tensors of the state that have other shapes than their
        parameters, such as `row_var` of Adafactor. They come in the same order on all ranks. One
        whose shape differs between ranks is left out.
    """
    parameters = [*_parameters(optimizer)]
    mine = [_numbered(optimizer, parameter) for parameter in parameters]
    alike = group.same(hashlib.blake2b(repr(mine).encode(), digest_size=16).digest())
    factors: list[Tensor] = []
    for parameter, *told in zip(
        parameters, *([mine] if alike else group.gathered(mine)), strict=True
    ):
        entries = {name: value for some in told for name, value in some.items()}
        if not alike:
            _unite(optimizer, parameter, told, entries)
        factors += (
            optimizer.state[parameter][name]
            for name, value in entries.items()
            if isinstance(value, Blank)
            and value.shape != tuple(parameter.shape)
            and all(some.get(name, value) == value for some in told)
        )
    return factors


def _unite(
    optimizer: Optimizer,
    parameter: Parameter,
    told: Sequence[Mapping[str, Any]],
    entries: Mapping[str, Any],
) -> None:
    """Give this rank the entries of a parameter's state that other ranks have."""
    state = optimizer.state[parameter] if entries else {}
    most: Mapping[str, Any] = max(told, key=_steps)
    for name, value in {**entries, **most}.items():
        if isinstance(value, Counted):
            state[name] = value.blank.filled(parameter).fill_(value.number)
        elif not isinstance(value, Blank):
            state[name] = value
        elif not isinstance(state.get(name), Tensor):
            state[name] = value.filled(parameter)


def _numbered(optimizer: Optimizer, parameter: Parameter) -> dict[str, Any]:
    """A parameter's state by name: moments and factors as `Blank`, and what is one number."""
    found: dict[str, Any] = {}
    for name, value in sorted(optimizer.state.get(parameter, {}).items()):
        if _is_moment(name, value, parameter) or _is_factor(name, value):
            found[name] = Blank.of(value, parameter)
        elif isinstance(value, Tensor) and not value.dim():
            found[name] = Counted(Blank.of(value, parameter), value.item())
        elif isinstance(value, int | float):
            found[name] = value
    return found


def _steps(entries: Mapping[str, Any]) -> float:
    """How many steps a state has seen; negative if there is none."""
    step = entries.get("step", 0 if entries else -1)
    return float(step.number if isinstance(step, Counted) else step)


def average_state(optimizer: Optimizer, collectives: Collectives) -> None:
    """Replace the ranks' moments and factors by their mean, after `unite_state`. Collective."""
    factors = unite_state(optimizer, collectives.group)
    slots = moments(optimizer).values()
    for moment in chain(factors, *(slot.values() for slot in slots)):
        collectives.sum_(torch.view_as_real(moment) if moment.is_complex() else moment)
        moment.div_(collectives.group.size)


def moments(optimizer: Optimizer) -> dict[str, dict[Parameter, Tensor]]:
    """The moments: real or complex tensors of the state that have their parameter's shape.

    Returns:
        For each name in the state, the moment of each parameter; after `unite_state` these are in
        the same order on all ranks.
    """
    found: dict[str, dict[Parameter, Tensor]] = {}
    for parameter in _parameters(optimizer):
        for name, value in optimizer.state.get(parameter, {}).items():
            if _is_moment(name, value, parameter):
                found.setdefault(name, {})[parameter] = value
    return {name: found[name] for name in sorted(found)}


def _is_moment(name: str, value: Any, parameter: Parameter) -> bool:
    return _is_mean(name, value) and value.shape == parameter.shape


def _is_factor(name: str, value: Any) -> bool:
    return _is_mean(name, value) and value.dim() > 0


def _is_mean(name: str, value: Any) -> bool:
    """Whether replicas may replace a value of the state by its mean."""
    if not isinstance(value, Tensor) or name == "step":
        return False
    return value.is_floating_point() or value.is_complex()


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
            name: Blank.of(value, parameter) if isinstance(value, Tensor) else value
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
