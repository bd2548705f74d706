"""Finds what a loop neither averages nor saves although the program trains it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hpc_train.errors import plural
from hpc_train.gradients.hooks import before_any_step
from hpc_train.gradients.ownership import OWNERS, is_wrapped, parameters_of, trained_by

logger = logging.getLogger(__name__)


def held_by(thing: Any) -> list[Any]:
    """What an object has in its attributes, and in the lists and dicts there."""
    return [] if isinstance(thing, Optimizer) else tree_leaves(getattr(thing, "__dict__", {}))


def parameters_known(model: nn.Module, optimizer: Optimizer, things: Iterable[Any]) -> set[int]:
    """The ids of the parameters that a loop averages and saves, or leaves to the program.

    Args:
        model: the loop's.
        optimizer: the loop's.
        things: the registered objects. They may have parameters that the program averages.
    """
    things = list(things)
    modules = [model, *(thing for thing in things if isinstance(thing, nn.Module))]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    known |= {id(parameter) for parameter in parameters_of(optimizer)}
    return known | {id(held) for thing in things for held in held_by(thing)}


@contextmanager
def telling_of_outsiders(known: Callable[[], set[int]]) -> Iterator[None]:
    """A block in which a warning names optimizers that step what the loop does not have.

    It may be meant, as for a probe that all ranks fit to the same data. So each class of optimizers
    is told once.

    Args:
        known: returns what `parameters_known` does.
    """
    seen: WeakSet[Optimizer] = WeakSet()
    told: set[type] = set()

    def look(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in seen:
            return
        seen.add(optimizer)
        if type(optimizer) in told or is_wrapped(optimizer):  # that one averages by itself
            return
        # With memory.zero, the optimizer of another averager has parts that nobody owns.
        if any(owner.optimizer is optimizer for owner in OWNERS.values()):
            return
        there = known()
        lost = [p for p in trained_by(optimizer) if id(p) not in there and p not in OWNERS]
        if not lost:
            return
        told.add(type(optimizer))
        logger.warning(
            "an optimizer (%s) steps %s that the loop's model lacks, so each rank trains them by "
            "itself, and no checkpoint has them: unless that is meant, give as the model one "
            "module that has all that is trained, such as torch.nn.ModuleList([model, critic]), "
            "and give the optimizer to loop.register",
            type(optimizer).__name__,
            plural(len(lost), "parameter"),
        )

    hook = before_any_step(look)
    try:
        yield
    finally:
        hook.remove()
