"""A gate in front of a module, which says when the module's parameters are needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hpc_train.errors import UserError


class Attendant(Protocol):
    """Makes the parameters of modules ready. Both methods may wait."""

    def before_forward(self, place: int) -> None:
        """Make ready for the forward pass of the module at a place in the sequence of gates."""

    def before_backward(self, place: int) -> None:
        """Make ready for the backward pass of the module at a place in the sequence of gates."""


class Gate:
    """Takes the place of a module's `forward`, and calls an attendant if it has one.

    Args:
        module: the module.
        name: its name in the model.
        original: computes the module.
        before: the gate that is passed directly before this one; None if it is unknown.
    """

    def __init__(
        self, module: nn.Module, name: str, original: Callable[..., Any], before: Gate | None
    ) -> None:
        self.module, self.name, self.original, self.before = module, name, original, before
        self.attendant: Attendant | None = None
        self.place = 0
        self._output: list[weakref.ref[Tensor]] = []  # the tensors that the module returned last

    def __call__(self, *args: Any, **how: Any) -> Any:
        """Compute the module, once its parameters are ready."""
        if self.attendant is None:
            return self.original(*args, **how)
        self._check_order(args)
        self.attendant.before_forward(self.place)
        output = self.original(*args, **how)
        self._output = [weakref.ref(tensor) for tensor in _tensors(output)]
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)
        return output

    def _check_order(self, args: Sequence[Any]) -> None:
        """Refuse a module that does not take the output of the one before.

        Parameters are taken away when the next module is reached. So no other one may be under way.
        """
        if self.before is None:
            return
        known = {id(tensor) for one in self.before._output if (tensor := one()) is not None}
        if not any(id(tensor) in known for tensor in _tensors(args[:1])):
            raise UserError(
                f"stage {self.name} does not take the result of stage {self.before.name}",
                "memory.zero 3 needs a model whose `stages` are called in order, each with the "
                "result of the one before",
            )

    def remove(self) -> None:
        """Give the module its own `forward` back."""
        self.module.forward = self.original

    def _before_backward(self, _: Tensor) -> None:
        if self.attendant is not None:
            self.attendant.before_backward(self.place)


def _tensors(tree: Any) -> Iterable[Tensor]:
    """The tensors in a tensor, list, tuple or dict."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def attend(gates: Sequence[Gate], attendant: Attendant | None) -> None:
    """Give all gates an attendant, and each its place in the sequence. None takes it away."""
    for place, gate in enumerate(gates):
        gate.place, gate.attendant = place, attendant
