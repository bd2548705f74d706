"""Records which averager has which parameter, so that no gradient is averaged twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from hpc_train.errors import UserError
from hpc_train.mpi.agreement import same
from hpc_train.mpi.group import Group

if TYPE_CHECKING:
    from hpc_train.gradients.mpi import BucketAverager

OWNERS: Any = WeakIdKeyDictionary()
"""For each parameter, the averager that has it."""


def trained(model: nn.Module, optimizer: Optimizer, *followed: Optimizer) -> list[Parameter]:
    """The parameters of a new averager.

    They are all that the optimizer trains, and those of the model and of the optimizers that it
    follows that no other averager has. They come in the model's order; parameters outside of the
    model come last.
    """
    mine = {id(p) for p in trained_by(optimizer)}
    steps = (p for one in (optimizer, *followed) for p in trained_by(one))
    there = {id(p): p for p in (*model.parameters(), *steps) if p.requires_grad}
    return [p for key, p in there.items() if key in mine or p not in OWNERS]


def take_over(optimizer: Optimizer, group: Group) -> None:
    """Take an optimizer's parameters from the averagers that have them. Collective.

    An averager is closed if its optimizer is this one or has some of these parameters, as when a
    second loop trains the model of a first. The closed averager's optimizer refuses to step,
    because its gradients are no longer averaged, unless it is this one.

    Raises:
        UserError: an averager has divided the parameters over nodes, or ranks find other averagers;
            on all ranks.
    """
    wanted = trained_by(optimizer)
    # With memory.zero the optimizer has parts of the parameters, and perhaps none on this rank.
    mine = [o for o in OWNERS.values() if o.optimizer is optimizer]
    found = [*mine, *(OWNERS.get(p) for p in wanted)]
    owners = {id(owner): owner for owner in found if owner is not None}.values()
    ended = [owner for owner in owners if _shares(owner, optimizer, wanted)]
    what = "the number of averagers that have the optimizer's parameters"
    counts = f"{len(owners)} {len(ended)}"
    same(group, what, counts, "give all ranks the same model and optimizer")
    # Also if this optimizer trains others: all of the model's parameters get rank 0's values.
    if any(getattr(owner, "streamed", ()) for owner in owners):
        raise UserError(
            "the model has parameters that another loop has divided over nodes",
            "close that loop before you make this one",
        )
    for owner in owners:
        if owner not in ended:
            owner.release([p for p in wanted if OWNERS.get(p) is owner])
            continue
        owner.close()
        if owner.optimizer is not optimizer:
            owner.optimizer.register_step_pre_hook(_refuse)


def _shares(owner: BucketAverager, optimizer: Optimizer, wanted: Iterable[Parameter]) -> bool:
    """Whether an averager's own optimizer is this one, or trains some of these parameters."""
    theirs = {id(p) for p in (*parameters_of(owner.optimizer), *getattr(owner, "shared", ()))}
    return owner.optimizer is optimizer or any(
        OWNERS.get(p) is owner and id(p) in theirs for p in wanted
    )


def _refuse(*_: Any) -> None:
    raise UserError(
        "this optimizer's gradients are no longer averaged: another averager has been set up for "
        "its parameters",
        "step the optimizer that was given last, or give one optimizer all parameters",
    )


def refuse_closed(*_: Any, **__: Any) -> Any:
    """Takes the place of a closed averager's methods, which would give each rank its own result.

    Raises:
        UserError: always.
    """
    raise UserError(
        "the averager was closed: gradients are no longer averaged",
        "close it after the last step, or set up another one by average_gradients",
    )


def claim(parameters: Iterable[Parameter], by: BucketAverager) -> None:
    """Record that an averager has these parameters."""
    for parameter in parameters:
        OWNERS[parameter] = by


def disown(parameters: Iterable[Parameter]) -> None:
    """Record that no averager has these parameters."""
    for parameter in parameters:
        OWNERS.pop(parameter, None)


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """All parameters of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained_by(optimizer: Optimizer) -> list[Parameter]:
    """The parameters of an optimizer that require gradients, in its order."""
    return [p for p in parameters_of(optimizer) if p.requires_grad]


def is_wrapped(optimizer: Optimizer) -> bool:
    """Whether an optimizer was made by hvd.DistributedOptimizer, and so averages by itself."""
    # Horovod makes a class derived from the user's, so `isinstance` does not find it.
    method = getattr(type(optimizer), "skip_synchronize", None)
    return getattr(method, "__module__", "") == "horovod.torch.optimizer"
