"""Finds and checks parameters that came after averaging was set up.

They were unfrozen, added to an optimizer, or put in the place of others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives.overwrite import bits
from hpc_train.gradients.ownership import parameters_of, trained
from hpc_train.mpi.agreement import same
from hpc_train.mpi.group import Group


class TakingPart:
    """The parameters that an averager averages, and whether its optimizers have got others.

    Args:
        model: the averager's.
        optimizer: its own.

    Attributes:
        optimizers: its own, and then those that it follows.
        left: the ids of parameters that it has left to another averager.
        known: the ids of the optimizers' parameters when they were remembered.
        frozen: those that were not trained then.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizers = [optimizer]
        self.left: set[int] = set()
        self.remember()

    def now(self) -> list[Parameter]:
        """The parameters to average as things are now."""
        return [p for p in trained(self.model, *self.optimizers) if id(p) not in self.left]

    def parameters(self) -> list[Parameter]:
        """All parameters of the optimizers, in their order."""
        return [p for optimizer in self.optimizers for p in parameters_of(optimizer)]

    def remember(self, more: Iterable[Parameter] = ()) -> None:
        """Remember the parameters, and whether they and `more` are trained."""
        there = self.parameters()
        self.known = [id(p) for p in there]
        self.frozen = [p for p in (*there, *more) if not p.requires_grad]

    def changed(self) -> bool:
        """Whether the optimizers have other parameters now, or train one that was frozen."""
        known = self.known == [id(p) for p in self.parameters()]
        return not known or any(p.requires_grad for p in self.frozen)


def check_added(group: Group, added: Sequence[Parameter]) -> None:
    """Check that all ranks have added parameters of the same shapes and dtypes. Collective.

    Raises:
        UserError: the ranks have added different ones.
    """
    remedy = "change them in the same way on all ranks"
    same(group, "the list of parameters added to the optimizer", _forms(added), remedy)


def check_trained(group: Group, trained: Sequence[Parameter]) -> None:
    """Check that all ranks train parameters of the same shapes and dtypes. Collective.

    Raises:
        UserError: the ranks have frozen different ones.
    """
    remedy = "freeze and unfreeze the same parameters on all ranks"
    same(group, "the list of parameters that are trained (requires_grad)", _forms(trained), remedy)


def check_alike(group: Group, added: Sequence[Parameter]) -> None:
    """Check that all ranks have added the same parameters with the same values. Collective.

    Raises:
        UserError: shapes, dtypes or values differ.
    """
    check_added(group, added)
    check_added_values(group, added)


def check_added_values(group: Group, added: Sequence[Parameter]) -> None:
    """Check that the added parameters have the same values on all ranks. Collective.

    Raises:
        UserError: a value differs.
    """
    same(
        group,
        "the value of a parameter that was added after averaging was set up",
        "".join(_digest(p) for p in added),
        "call `averager.refresh()` (of a Loop: `loop.averager`) on all ranks right after adding "
        "parameters: it gives all ranks the values of rank 0",
    )


def _forms(parameters: Sequence[Parameter]) -> str:
    return repr([(tuple(p.shape), str(p.dtype)) for p in parameters])


def _digest(parameter: Parameter) -> str:
    near = parameter.detach().cpu().contiguous()
    return hashlib.blake2b(bits(near).numpy().data, digest_size=16).hexdigest()
