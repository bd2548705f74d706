"""What `grad` of a parameter is between the backward pass and averaging: a promise of the mean.

A rank's own gradient is not what a plain loop would see: whoever clips it, or looks at its norm,
would do so to a part. So `grad` is a tensor without memory, and the first operation on it averages:
`clip_grad_norm_` before the optimizer's step, a look at a norm, torch's GradScaler work as they do
in one process. That makes the first look at a gradient collective, as the optimizer's step is.

The backward pass itself adds to it, too, in a second micro-batch; this alone reaches the bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError


class PendingGradient(Tensor):
    """Stands for the averaged gradient until there is one.

    Args:
        like: has the gradient's shape, strides, dtype and device.
        add: adds a gradient that a backward pass has made.
        average: averages, and returns the gradient; raises where no rank has it whole.
    """

    # Python's own hooks for subclasses are left out: those of the dispatcher are enough.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    add_gradient: Callable[[Tensor], None]
    averaged: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, like: Tensor, add: Callable[[Tensor], None], average: Callable[[], Tensor]
    ) -> PendingGradient:
        """A tensor subclass without memory is made here."""
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.add_gradient, made.averaged = add, average
        return made

    def __init__(self, like: Tensor, add: Any, average: Any) -> None:
        """All was done by `__new__`."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out an operation that has such gradients among its arguments."""
        if torch._C._current_graph_task_id() != -1:  # a backward pass
            if func is torch.ops.aten.add_.Tensor:
                args[0].add_gradient(args[1])
                return args[0]
            if func is torch.ops.aten.add.Tensor:  # what it adds shall have a graph
                raise has_graph()
        return func(*_real(args), **_real(kwargs or {}))

    def type(self, *args: Any, **kwargs: Any) -> Any:
        """What Horovod asks first of a gradient that it is to sum, in the memory that is not there.

        Raises:
            UserError: in a backward pass.
        """
        if torch._C._current_graph_task_id() != -1:
            raise UserError(
                "Horovod averages gradients that are averaged already: hvd.DistributedOptimizer "
                "has wrapped the optimizer after it was given to the loop or the averager",
                "give what hvd.DistributedOptimizer returned, or leave it out",
            )
        return self.averaged().type(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """The averaged gradient's elements: torch does not dispatch this."""
        return self.averaged().numpy(force=force)


def has_graph() -> UserError:
    """What a gradient of gradients is answered with."""
    return UserError(
        "backward(create_graph=True) makes gradients that have a graph; their mean over the ranks "
        "has none",
        "compute gradients of gradients by torch.autograd.grad",
    )


def _real(value: Any) -> Any:
    if isinstance(value, PendingGradient):
        return value.averaged()
    if isinstance(value, (list, tuple)):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {name: _real(item) for name, item in value.items()}
    return value
