"""The tensor in `grad` between the backward pass and averaging: a promise of the mean.

A rank's own gradient is only a part of the gradient that a loop in one process sees. Code that
clips it or computes its norm would get a wrong number. So `grad` is a tensor without memory, and
the first operation on it averages. `clip_grad_norm_` before the optimizer's step, norms and torch's
GradScaler then work as in one process. In return, the first look at a gradient is collective, as
the optimizer's step is.

A second micro-batch's backward pass adds to `grad`, too. This operation alone does not average: it
adds to the bucket. Any other operation in a backward pass is refused, because the rest of the
gradients is not there yet. torch.compile, too, may see a promise without averaging.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from hpc_train.errors import UserError


class PendingGradient(Tensor):
    """Stands for the averaged gradient until there is one.

    Args:
        like: has the gradient's shape, strides, dtype and device.
        add: adds a gradient that a backward pass has made.
        average: averages, and returns the averaged gradient; raises if no rank has all of it.
    """

    # `__torch_dispatch__` sees every operation, so the hook of Python's functions is not needed.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    add_gradient: Callable[[Tensor], None]
    averaged: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, like: Tensor, add: Callable[[Tensor], None], average: Callable[[], Tensor]
    ) -> PendingGradient:
        """Make the tensor: torch has only this way to make a subclass without memory."""
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.add_gradient, made.averaged = add, average
        return made

    def __init__(self, like: Tensor, add: Any, average: Any) -> None:
        """Do nothing: `__new__` has done all."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out an operation that has such gradients among its arguments."""
        if _in_backward_pass():
            if func is torch.ops.aten.add_.Tensor and isinstance(args[0], PendingGradient):
                args[0].add_gradient(args[1])
                return args[0]
            if func is torch.ops.aten.add.Tensor and torch.is_grad_enabled():
                raise has_graph()  # create_graph=True adds out of place
            raise looked_too_early()
        return func(*_real(args), **_real(kwargs or {}))

    def type(self, *args: Any, **kwargs: Any) -> Any:
        """The averaged gradient in another type.

        In a backward pass only Horovod calls this, before it would sum memory that is not there.

        Raises:
            UserError: it is called in a backward pass.
        """
        if _in_backward_pass():
            raise UserError(
                "Horovod averages gradients that are averaged already: hvd.DistributedOptimizer "
                "has wrapped the optimizer after it was given to the loop or the averager",
                "wrap it first and give the wrapped one, or leave hvd.DistributedOptimizer out",
            )
        return self.averaged().type(*args, **kwargs)

    def share_memory_(self) -> Any:
        """Refuse to move the gradient out of the memory in which it is averaged.

        Raises:
            UserError: always.
        """
        raise UserError(
            "share_memory_() would move a gradient out of the memory in which it is averaged",
            "share a copy: p.grad.clone().share_memory_()",
        )

    @property
    def data(self) -> Tensor:
        """The averaged gradient. What is assigned takes its place, without a call of dispatch."""
        return self._looked().data

    @data.setter
    def data(self, value: Tensor) -> None:
        self._looked().data = value

    def _looked(self) -> Tensor:
        if _in_backward_pass():
            raise looked_too_early()
        return self.averaged()


def _looking(name: str) -> Callable[..., Any]:
    """A method of tensors that torch does not dispatch, called on the averaged gradient."""
    own = getattr(Tensor, name) if name in OF_COMPILER else None

    def method(self: PendingGradient, *args: Any, **kwargs: Any) -> Any:
        if own is not None and TracingContext.try_get() is not None:
            return own(self, *args, **kwargs)
        return getattr(self._looked(), name)(*args, **kwargs)

    method.__name__ = name
    return method


OF_COMPILER = ("untyped_storage", "storage_offset")
"""torch.compile calls these on `grad` of each parameter that new code reads, when one rank may make
code and others not. It only describes the tensor, so the promise's own answers will do."""
UNDISPATCHED = (
    *OF_COMPILER,
    "numpy",
    "tolist",
    "data_ptr",
    "__array__",
    "__dlpack__",
    "__dlpack_device__",
    "__deepcopy__",
    "__reduce_ex__",
)
"""Methods that give others the gradient's memory, which a promise does not have."""
for _name in UNDISPATCHED:
    setattr(PendingGradient, _name, _looking(_name))


def _in_backward_pass() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def looked_too_early() -> UserError:
    """The error for code of the program that uses `grad` in a backward pass."""
    return UserError(
        "a hook has read, changed or dropped `grad` of a parameter in a backward pass, before the "
        "gradients are averaged",
        "do that after the backward pass",
    )


def dropped_too_early() -> UserError:
    """The error for a gradient that was kept over a `zero_grad` before it was averaged."""
    return UserError(
        "a gradient that was kept without a copy was dropped before it was averaged over the ranks",
        "keep p.grad.clone()",
    )


def has_graph() -> UserError:
    """The error for gradients that themselves have a graph."""
    return UserError(
        "backward(create_graph=True) makes gradients that have a graph; their mean over the ranks "
        "has none",
        "compute gradients with respect to inputs by torch.autograd.grad; those with respect to "
        "parameters would be of this rank's samples only",
    )


def _real(value: Any) -> Any:
    if isinstance(value, PendingGradient):
        return value.averaged()
    if isinstance(value, (list, tuple)):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {name: _real(item) for name, item in value.items()}
    return value
