"""A parameter's place in its bucket, and how far its gradient is in the step under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.gradients.buckets import Bucket, is_dense
from hpc_train.gradients.pending import PendingGradient

UNSTEADY = -1


class Slot:
    """Takes the gradients of one parameter.

    Args:
        parameter: whose `grad` it looks after.
        view: its part of the bucket, which holds this rank's share of the mean, then the mean.
        home: the bucket's number.
        share: what each gradient is multiplied by on its way into the bucket.
        average: what the first look at `grad` has to do; returns the averaged gradient.

    Attributes:
        gradient: what `grad` is after averaging: the view, or a copy in the parameter's dtype.
        pending: what `grad` is before.
        filled: whether the bucket has a gradient of this step.
        begun: whether the bucket's sum has.
        late: what came after the bucket's sum had begun, multiplied by the share.
        kept: a copy of what an earlier step had left, where that alone went into the sum.
        arrived: gradients of this step.
        expected: gradients per step, the same in the last two; else UNSTEADY.
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

    def begin_step(self) -> None:
        """Nothing of a new step is there yet."""
        self.filled, self.begun, self.arrived = False, False, 0
        self.late = self.kept = None

    def take(self, gradient: Tensor) -> None:
        """Take a gradient that lies elsewhere: the step's first, or one put in its place."""
        if self.begun:
            self.late = torch.empty_like(self.view) if self.late is None else self.late
            _scaled(gradient, self.share, self.late)
        else:
            _scaled(gradient, self.share, self.view)
            self.filled = True

    def add(self, gradient: Tensor) -> None:
        """Add another gradient of the step, which the backward pass would add to `pending`."""
        if self.begun:
            self.late = torch.zeros_like(self.view) if self.late is None else self.late
            self.late.add_(gradient, alpha=self.share)
        else:
            self.view.add_(gradient, alpha=self.share)

    def begin(self) -> None:
        """The bucket's sum begins: what is not there counts as zero.

        What an earlier step has left in `grad` is there, also where no gradient is added to it.
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
        """Keep what an earlier step has left out of the sum of a step that is given up."""
        gradient = self.parameter.grad
        if self.kept is not None and gradient is self.pending:
            self.parameter.grad = self.kept
        elif not self.filled and gradient is self.view:
            self.parameter.grad = gradient.clone()
        self.filled = True

    def learn(self) -> None:
        """Expect in the next step what came in this one, if it came in the one before as well."""
        self.expected = self.arrived if self.arrived == self.before else UNSTEADY
        self.before = self.arrived

    def publish(self, *, used: bool) -> None:
        """Make the mean what `grad` is; None if no rank had a gradient, as in a plain loop."""
        if used and self.gradient is not self.view:
            self.gradient.copy_(self.view)
        self.parameter.grad = self.gradient if used else None


def slots_of_buckets(
    buckets: Sequence[Bucket],
    flats: Sequence[Tensor],
    share: float,
    average: Callable[[Slot], Tensor],
) -> list[list[Slot]]:
    """The slots of all parameters, by bucket."""
    return [
        [
            Slot(parameter, view, home, share, average)
            for parameter, view in bucket.views(flat).items()
        ]
        for home, (bucket, flat) in enumerate(zip(buckets, flats, strict=True))
    ]


def _published(parameter: Parameter, view: Tensor) -> Tensor:
    """Memory for the mean with the dtype and strides that autograd gives a gradient."""
    dense = is_dense(parameter)
    strides = parameter.stride() if dense else view.stride()
    if view.dtype == parameter.dtype and view.stride() == strides:
        return view
    kept = torch.preserve_format if dense else torch.contiguous_format
    return torch.empty_like(parameter.detach(), memory_format=kept)


def _scaled(gradient: Tensor, share: float, view: Tensor) -> None:
    """Write a gradient times the share to a view."""
    if gradient.dtype is view.dtype and gradient.layout is torch.strided:
        torch.mul(gradient, share, out=view)
    elif gradient.layout is not torch.strided:
        view.zero_().add_(gradient, alpha=share)
    else:  # in the view's wider numbers
        view.copy_(gradient).mul_(share)
