"""Finds out whether a forward pass uses the result of a stage that another rank has computed.

A rank of a pipeline gets one activation, from the rank before it. In the forward pass it stands for
the result of each stage before the rank's own. What the model computes from these results is
discarded, because the rank's first stage gets the activation itself. If the model uses them
elsewhere, as in a skip connection over several ranks, it gets wrong numbers and loses gradients.
So the type `Received` marks them. What is computed from them has this type, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hpc_train.errors import UserError

_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
# Results that depend on the shape and the type of their first argument, and not on its numbers.
_FORMS = {*(getattr(torch, name) for name in _LIKE), *(getattr(Tensor, name) for name in _NEW)}
# The same is true of the second argument of these.
_AS = {getattr(Tensor, name) for name in ("type_as", "to", "expand_as", "view_as", "reshape_as")}

# These take numbers out of a tensor, where no mark can follow them. Truth values are left out: a
# program may check that numbers are finite.
_NUMBERS = {
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "__array__", "__dlpack__"),
        *("__float__", "__int__", "__index__", "__complex__"),
    )
}


class Received(Tensor):
    """An activation of another rank, or what was computed from one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out an operation, and mark its result unless no number in it was received.

        Raises:
            UserError: the operation takes numbers out of the tensor.
        """
        if func in _NUMBERS:
            raise UserError(
                f"the forward pass takes numbers ({func.__name__}) from the result of a stage that "
                "another rank has computed",
                "let a stage do it: only the stage after that one gets the result",
            )
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        form = func in _FORMS and not depends_on_received((args[1:], kwargs))
        if form or (func in _AS and not isinstance(args[0], Received)):
            return tree_map(_plain, result)
        written = [kwargs.get("out"), args[0] if args and _in_place(func) else None]
        for tensor in tree_leaves(written):  # torch._foreach_ operations write to lists
            if isinstance(tensor, Tensor):
                for target in (tensor, tensor._base):  # a write to a view changes its base
                    if type(target) is Tensor:
                        target.__class__ = Received
        return result

    def __iter__(self) -> Iterator[Tensor]:
        """Refuse to take the result apart, as in `h, weights = self.first(x)`.

        Raises:
            UserError: always.
        """
        raise UserError(
            "the forward pass takes the result of a stage apart, and only one tensor passes from a "
            "rank to the next",
            "let each stage return one tensor",
        )


def received(activation: Tensor) -> Tensor:
    """A new tensor with the numbers of an activation that marks what is computed from it."""
    marked = activation.detach().as_subclass(Received)
    return marked.requires_grad_(activation.requires_grad)


def depends_on_received(values: Any) -> bool:
    """Whether a tensor among some values is, or was computed from, a `received` one."""
    return any(isinstance(value, Received) for value in tree_leaves(values))


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Received) else value


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")  # such as __iadd__
    return name.endswith("_")
