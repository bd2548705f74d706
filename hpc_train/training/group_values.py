"""The values that an optimizer itself keeps in its groups, and other state that it keeps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hpc_train.checkpoint.holdings import PLAIN
from hpc_train.errors import CheckpointMismatch
from hpc_train.gradients.ownership import parameters_of

NESTED = 8  # a step may call others of the same optimizer
OF_TORCH = {"state", "param_groups"}
"""The keys of what `state_dict` of torch's optimizers returns."""


class GroupValues:
    """Knows which values of an optimizer's groups are state, and not options of the program.

    Optimizers such as Prodigy and Schedule-Free count steps there, and estimate their step's size.
    Such a value changes in `step`. Or the optimizer has made it itself, since neither its
    constructor nor one of torch's optimizers takes an argument of that name, and it is not what it
    was in the beginning. All other values stay as the program sets them, also if it sets others in
    its next start.

    Args:
        optimizer: `before_step` and `after_step` are called before and after each of its steps,
            unless it is one of torch's own, which keep no state there.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.keys: set[str] = set()
        self.unsaved: set[str] = set()
        """The keys of values that have a type which checkpoints cannot hold."""
        self.of_torch = type(optimizer).__module__.startswith("torch.optim")
        torchs = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
        kinds = [kind for kind in (*type(optimizer).__mro__, *torchs) if "__init__" in vars(kind)]
        taken = {
            name for kind in kinds for name in inspect.signature(vars(kind)["__init__"]).parameters
        }
        self._made = {key for key in optimizer.defaults if key not in taken}
        self._first = self._marks()
        self._before: list[list[dict[str, Any]]] = []  # of steps that are under way

    def _marks(self) -> list[dict[str, Any]]:
        """For each group, what tells by key whether a value has changed."""
        return [
            {key: mark_of(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def before_step(self, *_: Any) -> None:
        """Remember the values before a step. A step may call that of its base class."""
        self._before.append(self._marks())
        del self._before[:-NESTED]  # of steps that have raised

    def after_step(self, *_: Any) -> None:
        """Find the values that the step has changed."""
        if self._before:
            self.keys |= self._changed_since(self._before.pop())

    def _changed_since(self, before: list[dict[str, Any]]) -> set[str]:
        pairs = zip(before, self._marks(), strict=False)
        return {key for was, now in pairs for key in now if key not in was or was[key] != now[key]}

    def present(self) -> list[dict[str, Any]]:
        """These values now, for each group by key, but for those that checkpoints cannot hold."""
        if self.of_torch:
            return []
        self.keys |= self._made & self._changed_since(self._first)
        groups = self.optimizer.param_groups
        self.unsaved |= {k for group in groups for k in self.keys if not _holds(group.get(k))}
        return [
            {key: _plain(group[key]) for key in sorted(self.keys - self.unsaved) if key in group}
            for group in groups
        ]

    def restore(self, saved: list[dict[str, Any]]) -> None:
        """Give the groups the values that `present` has returned earlier."""
        put_in_groups(self.optimizer, saved)
        self.keys.update(key for values in saved for key in values)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _holds(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_holds, value))
    return isinstance(_plain(value), (Tensor, *PLAIN))


def mark_of(value: Any) -> Any:
    """What differs once a value has changed. It is compared without a wait for a device."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, list | tuple):
        return [mark_of(one) for one in value]
    return value if isinstance(value, PLAIN) else id(value)


def put_in_groups(optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    """Give an optimizer's groups saved values. Tensors stay the same objects.

    Raises:
        CheckpointMismatch: the optimizer has another number of groups.
    """
    groups = optimizer.param_groups
    if len(saved) != len(groups):
        raise CheckpointMismatch(
            f"the checkpoint's optimizer has {len(saved)} groups, this one {len(groups)}",
            "give the optimizer the same groups of parameters as before; for a group that is "
            "added later, close the loop and make another one in a directory of its own",
        )
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            if not isinstance(value, Tensor):
                group[key] = value
            elif isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:  # the first step makes a tensor of the number
                group[key] = value.to(next(iter(group["params"]), value).device)


def load_in_place(optimizer: Optimizer, state: Any) -> None:
    """Load an optimizer's state into the groups that it has, which another one may share."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(state)
    _keep_types(optimizer, state)
    if optimizer.param_groups is not groups and len(groups) == len(optimizer.param_groups):
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        with suppress(AttributeError):  # it may be a property that only reads
            optimizer.param_groups = groups


def _keep_types(optimizer: Optimizer, state: Any) -> None:
    """Give tensors that are slots the dtypes that were saved: torch takes the parameters' dtypes.

    So float32 copies of 16-bit weights would lose their digits.
    """
    if not isinstance(state, dict) or not isinstance(slots := state.get("state"), dict):
        return  # an optimizer's own form
    for number, parameter in enumerate(parameters_of(optimizer)):
        now, before = optimizer.state.get(parameter), slots.get(number)
        if not (isinstance(now, dict) and isinstance(before, dict)):
            continue
        for name, saved in before.items():
            loaded = now.get(name)
            if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
                now[name] = loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)


def lost_with(optimizer: Optimizer, kept: Iterable[object]) -> list[str]:
    """Lines about the state of an optimizer that checkpoints do not hold.

    Args:
        optimizer: has taken a step.
        kept: objects whose state is saved besides.
    """
    name, saved, lines = type(optimizer).__name__, {id(thing) for thing in kept}, []
    for key, value in vars(optimizer).items():
        inside = [] if key in OF_TORCH else tree_leaves(value)
        for one in inside:
            if not isinstance(one, Optimizer) or id(one) in saved:
                continue
            if one.state and one.state is not optimizer.state:
                lines.append(
                    f"{name} has another optimizer in its attribute {key!r}, whose state a resumed "
                    "run lacks: give that optimizer to loop.register, too"
                )
    if not lines and (lost := sorted(_further(optimizer))):
        lines.append(
            f"state_dict() of {name} also returns {', '.join(map(repr, lost))}, which a resumed "
            "run lacks unless an object that has it is registered: keep it in the optimizer's "
            "param_groups, or give loop.register such an object"
        )
    return lines


def _further(optimizer: Optimizer) -> set[str]:
    """What an optimizer's own `state_dict` has besides the keys of torch and whole optimizers."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return set()
    try:
        found = optimizer.state_dict()
    except Exception:  # noqa: BLE001  # it was never called before, and need not work
        return set()
    return {
        str(key)
        for key, value in found.items()
        if key not in OF_TORCH and not (isinstance(value, dict) and value.keys() >= OF_TORCH)
    }
