"""Batches in pinned memory, from which a GPU copies while the processor goes on."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from hpc_train.data.substitutes import Substituted


def each_tensor(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with other tensors in place of its own, also inside lists, tuples and mappings."""
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return _like(data, {key: each_tensor(value, change) for key, value in data.items()})
    if isinstance(data, Substituted):
        changed = (each_tensor(value, change) for value in data)
        return Substituted.of((*changed,), data.pairs, data.causes)
    if isinstance(data, list | tuple):
        return _sequence_like(data, [each_tensor(value, change) for value in data])
    return data


def _sequence_like(data: list[Any] | tuple[Any, ...], made: list[Any]) -> Any:
    """A list or a tuple of the class of another one, if the class makes it of a list of items."""
    if hasattr(data, "_make"):  # a named tuple
        return data._make(made)
    with suppress(Exception):  # somebody's class
        found = type(data)(made)
        if len(found) == len(made) and all(map(operator.is_, found, made)):
            return found
    return made if isinstance(data, list) else tuple(made)


def _like(data: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the class of another one, such as `BatchEncoding`, if its items can be set."""
    if type(data) is dict:
        return items
    for inside in (False, True):
        with suppress(Exception):  # somebody's class
            made = copy.copy(data)
            if inside:  # its items may lie in an attribute, which the copy shares
                vars(made).update({name: copy.copy(one) for name, one in vars(data).items()})
            if _set(made, items, data):
                return made
    return items


def _set(made: Any, items: dict[Any, Any], data: Mapping[Any, Any]) -> bool:
    """Set the items of a batch's copy, unless the copy has the batch's own storage."""
    for key, value in items.items():
        before = data[key]
        made[key] = value
        if value is not before and data[key] is value:
            made[key] = before
            return False
    return True


def pinned(data: Any) -> Any:
    """A batch whose tensors are copied to pinned memory.

    torch keeps the pinned memory of tensors that are gone, and gives it to later ones. It waits for
    the event behind the last copy from there to a GPU first, so no copy reads what comes later.
    """
    return each_tensor(data, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())
