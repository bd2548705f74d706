"""A parameter's place in its bucket, and the state of its gradient in the current step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.gradients.buckets import Bucket, is_dense
from hpc_train.gradients.pending import PendingGradient

UNSTEADY = -1


class Slot:
    """Moves the gradients of one parameter into its bucket.

    Args:
        parameter: the parameter.
        view: its part of the bucket. It holds this rank's share of the mean, then the mean.
        home: the bucket's number; -1 for memory outside of the buckets.
        share: factor for each gradient on its way into the bucket.
        average: is called at the first look at `grad`; returns the averaged gradient.

    Attributes:
        gradient: the value of `grad` after averaging: the view, or a copy in the parameter's dtype.
        pending: the value of `grad` before averaging.
        before: number of gradients in the last step.
        filled: whether the bucket has a gradient of this step.
        begun: whether the bucket's sum has begun.
        late: gradients that came after the sum had begun, multiplied by the share.
        kept: a copy of the gradient that an earlier step had left, if only that went into the sum.
        arrived: number of gradients in this step so far.
        expected: number of gradients per step if the last two steps had the same; else UNSTEADY.
    """

    __slots__ = (
        "arrived",
        "before",
        "begun",
        "expected",
        "filled",
        "gradient",
        "home",
        "kept",
        "late",
        "parameter",
        "pending",
        "share",
        "view",
    )

    def __init__(
        self,
        parameter: Parameter,
        view: Tensor,
        home: int,
        share: float,
        average: Callable[[Slot], Tensor],
    ) -> None:
        self.parameter, self.view, self.home, self.share = parameter, view, home, share
        self.gradient = _published(parameter, view)
        self.pending = PendingGradient(self.gradient, self.add, lambda: average(self))
        self.filled = self.begun = False
        self.late: Tensor | None = None
        self.kept: Tensor | None = None
        self.arrived, self.before, self.expected = 0, UNSTEADY, UNSTEADY

    @property
    def in_sum(self) -> bool:
        """Whether a sum has begun that has a gradient of this step, if there was one."""
        return self.begun

    def begin_step(self) -> None:
        """Begin a step: no gradient of it has come yet."""
        self.filled, self.begun, self.arrived = False, False, 0
        self.late = self.kept = None

    def take(self, gradient: Tensor) -> None:
        """Take the step's first gradient, or one that the user has put in its place."""
        if self.begun:
            self.late = torch.empty_like(self.view) if self.late is None else self.late
            scaled(gradient, self.share, self.late)
        else:
            scaled(gradient, self.share, self.view)
            self.filled = True

    def add(self, gradient: Tensor) -> None:
        """Add a further gradient of the step, in place of the backward pass, which adds it."""
        if self.begun:
            self.late = torch.zeros_like(self.view) if self.late is None else self.late
            self.late.add_(gradient, alpha=self.share)
        else:
            self.view.add_(gradient, alpha=self.share)

    def begin(self) -> None:
        """Prepare for the bucket's sum: a missing gradient counts as zero.

        A gradient that an earlier step has left in `grad` takes part, even if no backward pass of
        this step has added to it.
        """
        if not self.filled:
            gradient = self.parameter.grad
            if gradient is None or gradient is self.pending or gradient.requires_grad:
                self.view.zero_()
            else:
                self.kept = gradient.clone()
                self.take(self.kept)
                self.parameter.grad = self.pending
        self.begun = True

    def set_apart(self) -> None:
        """Save a gradient that an earlier step has left, because its step is given up.

        The sum, which still has to be finished, overwrites the bucket.
        """
        gradient = self.parameter.grad
        if self.kept is not None and gradient is self.pending:
            self.parameter.grad = self.kept
        elif not self.filled and gradient is self.view:
            self.parameter.grad = gradient.clone()
        self.filled = True

    def learn(self) -> None:
        """Expect as many gradients in the next step as in this one, if the last had as many."""
        self.expected = self.arrived if self.arrived == self.before else UNSTEADY
        self.before = self.arrived

    def publish(self, *, used: bool) -> None:
        """Set `grad` to the mean, or to None if no rank had a gradient, as in a plain loop."""
        if used and self.gradient is not self.view:
            self.gradient.copy_(self.view)
        self.parameter.grad = self.gradient if used else None


def slots_of_buckets(
    buckets: Sequence[Bucket],
    flats: Sequence[Tensor],
    share: float,
    average: Callable[[Slot], Tensor],
    make: Callable[..., Slot] = Slot,
) -> list[list[Slot]]:
    """The slots of all parameters, by bucket; `make` takes the arguments of `Slot`."""
    return [
        [
            make(parameter, view, home, share, average)
            for parameter, view in bucket.views(flat).items()
        ]
        for home, (bucket, flat) in enumerate(zip(buckets, flats, strict=True))
    ]


def _published(parameter: Parameter, view: Tensor) -> Tensor:
    """Memory for the mean, with the dtype and strides that autograd gives a gradient.

    It is the view itself if that has them.
    """
    dense = is_dense(parameter)
    strides = parameter.stride() if dense else view.stride()
    if view.dtype == parameter.dtype and view.stride() == strides:
        return view
    kept = torch.preserve_format if dense else torch.contiguous_format
    return torch.empty_like(parameter.detach(), memory_format=kept)


def scaled(gradient: Tensor, share: float, view: Tensor) -> None:
    """Write a gradient of any layout and dtype, times the share, to a view."""
    if gradient.dtype is view.dtype and gradient.layout is torch.strided:
        torch.mul(gradient, share, out=view)
    elif gradient.layout is not torch.strided:
        view.zero_().add_(gradient, alpha=share)
    else:  # multiply in the view's wider dtype
        view.copy_(gradient).mul_(share)
