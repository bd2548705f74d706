"""A parameter's place in its bucket, and the state of its gradient in the current step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.gradients.buckets import Bucket, is_dense
from hpc_train.gradients.pending import PendingGradient, dropped_too_early

UNSTEADY = -1
OWN_REFERENCES = 2
"""What sys.getrefcount says of a tensor that only one attribute of a slot has."""


class GradientWriter:
    """Writes gradients to the buckets of parameters on the CPU: at once.

    `staging.StagedWriter` does so for parameters on another device.
    """

    def write(self, gradient: Tensor, share: float, into: Tensor) -> int:
        """Write a gradient times a factor; returns the number of the write, for `wait`."""
        scaled(gradient, share, into)
        return 0

    def add(self, gradient: Tensor, share: float, onto: Tensor) -> int:
        """Add a gradient times a factor; returns the number of the write, for `wait`."""
        onto.add_(gradient, alpha=share)
        return 0

    def wait(self, number: int) -> None:
        """Wait until a write has ended."""

    def room(self, like: Tensor) -> Tensor:
        """Memory for a gradient that waits, in the shape and dtype of a tensor."""
        return torch.empty(like.shape, dtype=like.dtype)

    def published(self, parameter: Parameter, view: Tensor, home: int) -> Tensor | None:
        """A tensor for the mean as autograd would make it, on the view's memory if it is like it.

        Args:
            parameter: the parameter.
            view: its part of the bucket.
            home: the bucket's number.
        """
        strides = parameter.stride() if is_dense(parameter) else view.stride()
        if view.dtype == parameter.dtype and view.stride() == strides:
            return view.detach()
        return gradient_like(parameter)

    def close(self) -> None:
        """Wait for all writes, and release memory."""


DIRECT_WRITER = GradientWriter()


class Slot:
    """Moves the gradients of one parameter into its bucket.

    Args:
        parameter: the parameter.
        view: its part of the bucket. It holds this rank's share of the mean, then the mean.
        home: the bucket's number; -1 for memory outside of the buckets.
        share: factor for each gradient on its way into the bucket.
        average: is called at the first look at `grad`; returns the averaged gradient.
        writer: writes gradients to memory of the host, such as the view.

    Attributes:
        gradient: the value of `grad` after averaging: on the view's memory, or a copy in the
            parameter's dtype and on its device; None if no rank has all of it.
        pending: the value of `grad` before averaging.
        before: number of gradients in the last step.
        filled: whether the bucket has a gradient of this step.
        hollow: whether there is no gradient behind the promise: none of this rank after a backward
            pass, and after averaging none of any rank.
        begun: whether the bucket's sum has begun.
        late: gradients that came after the sum had begun, multiplied by the share.
        apart: whether `gradient` has other memory than the view.
        kept: a copy of the gradient that an earlier step had left, if only that went into the sum.
        arrived: number of gradients in this step so far.
        expected: number of gradients per step if the last two steps had the same; else UNSTEADY.
        last_write: the number of the last write to the view or to memory in its place.
    """

    __slots__ = (
        "_average",
        "apart",
        "arrived",
        "before",
        "begun",
        "expected",
        "filled",
        "gradient",
        "hollow",
        "home",
        "kept",
        "last_write",
        "late",
        "parameter",
        "pending",
        "share",
        "view",
        "writer",
    )

    def __init__(
        self,
        parameter: Parameter,
        view: Tensor,
        home: int,
        share: float,
        average: Callable[[Slot], Tensor],
        writer: GradientWriter = DIRECT_WRITER,
    ) -> None:
        self.parameter, self.view, self.home, self.share = parameter, view, home, share
        self.writer, self.last_write = writer, 0
        self.gradient = writer.published(parameter, view, home)
        self.apart = self.gradient is not None and self.gradient.data_ptr() != view.data_ptr()
        self._average = average
        self.pending = self._promise()
        self.filled = self.begun = self.hollow = False
        self.late: Tensor | None = None
        self.kept: Tensor | None = None
        self.arrived, self.before, self.expected = 0, UNSTEADY, UNSTEADY

    def _promise(self) -> PendingGradient:
        like = self.parameter.detach() if self.gradient is None else self.gradient
        return PendingGradient(like, self._further, lambda: self._average(self))

    def _further(self, gradient: Tensor) -> None:
        """Take a gradient that a backward pass adds to the promise."""
        if self.hollow:
            self.hollow = False
            self.take(gradient)
        else:
            self.add(gradient)

    def promise(self) -> None:
        """Promise a mean in `grad` although a backward pass has not reached it on this rank.

        Another rank may have a gradient. Code that clips takes the gradients that are there before
        it looks at any of them, and may read one that an earlier step has left before it averages.
        """
        gradient = self.parameter.grad
        if self.filled or gradient is self.pending or not self.parameter.requires_grad:
            return
        if gradient is None:
            self.hollow = True
            self.parameter.grad = self.pending
        elif not (self.in_sum or gradient.requires_grad):
            self._leave(gradient)

    def _leave(self, gradient: Tensor) -> None:
        """Take a gradient that an earlier step has left."""
        self.kept = gradient.clone()
        self.take(self.kept)
        self.parameter.grad = self.pending

    @property
    def lacks(self) -> bool:
        """Whether `grad` is a promise, and this rank has no gradient of its own."""
        return self.hollow and self.parameter.grad is self.pending

    @property
    def has_gradient(self) -> bool:
        """Whether this rank has a gradient in `grad`, or has put one into the bucket."""
        return self.parameter.grad is not None and not self.lacks

    @property
    def in_sum(self) -> bool:
        """Whether a sum has begun that has a gradient of this step, if there was one."""
        return self.begun

    @property
    def in_bucket(self) -> bool:
        """Whether `grad` is the averaged gradient in the bucket itself."""
        mean = self.gradient
        same = mean is not None and self.parameter.grad is mean
        return same and mean.data_ptr() == self.view.data_ptr()  # type: ignore[union-attr]

    def part(self, *, averaged: bool) -> None:
        """Leave the gradient of a step that is over to code of the program that still has it.

        In one process nobody writes to such a gradient again. So it gets memory of its own here,
        and the slot gets new tensors.

        Args:
            averaged: whether the gradient was averaged; a promise that never was cannot be kept.
        """
        promised = sys.getrefcount(self.pending) > OWN_REFERENCES
        # Not by a local name: versions of Python differ in whether that is one more reference.
        seen = self.gradient is not None and sys.getrefcount(self.gradient) > OWN_REFERENCES
        if not (promised or seen):
            return
        grad, mean = self.parameter.grad, self.gradient
        if grad is self.pending or (grad is not None and grad is mean):
            return  # it was not dropped: further gradients are added to it
        if mean is not None and (seen or averaged):
            self.gradient = mean.detach()
            mean.data = mean.clone()
        if promised:
            self.pending.averaged = partial(_kept, mean if averaged else None)
            self.pending = self._promise()

    def begin_step(self) -> None:
        """Begin a step: no gradient of it has come yet."""
        if self.lacks:
            self.parameter.grad = None
        self.filled, self.begun, self.hollow, self.arrived = False, False, False, 0
        self.late = self.kept = None

    def take(self, gradient: Tensor) -> None:
        """Take the step's first gradient, or one that the user has put in its place."""
        if self.begun:
            self.late = torch.empty_like(self.view) if self.late is None else self.late
            self.writer.wait(self.writer.write(gradient, self.share, self.late))
        else:
            self.writer.wait(self.last_write)
            self.last_write = self.writer.write(gradient, self.share, self.view)
            self.filled = True

    def add(self, gradient: Tensor) -> None:
        """Add a further gradient of the step, in place of the backward pass, which adds it."""
        if self.begun:
            self.late = torch.zeros_like(self.view) if self.late is None else self.late
            self.writer.wait(self.writer.add(gradient, self.share, self.late))
        else:
            self.last_write = self.writer.add(gradient, self.share, self.view)

    def begin(self) -> None:
        """Prepare for the bucket's sum: a missing gradient counts as zero.

        A gradient that an earlier step has left in `grad` takes part, even if no backward pass of
        this step has added to it.
        """
        if not self.filled:
            gradient = self.parameter.grad
            if gradient is None or gradient is self.pending or gradient.requires_grad:
                self.writer.wait(self.last_write)
                self.view.zero_()
            else:
                self._leave(gradient)
        self.begun = True

    def set_apart(self) -> None:
        """Save a gradient that an earlier step has left, because its step is given up.

        The sum, which still has to be finished, overwrites the bucket.
        """
        gradient = self.parameter.grad
        if self.kept is not None and gradient is self.pending:
            self.parameter.grad = self.kept
        elif not self.filled and self.in_bucket:
            self.parameter.grad = self.view.clone()
        self.filled = True

    def learn(self) -> None:
        """Expect as many gradients in the next step as in this one, if the last had as many."""
        self.expected = self.arrived if self.arrived == self.before else UNSTEADY
        self.before = self.arrived

    def publish(self, *, used: bool) -> None:
        """Set `grad` to the mean, or to None if no rank had a gradient, as in a plain loop."""
        if used and self.gradient is not None:
            if self.apart:
                self.gradient.copy_(self.view)
            elif self.gradient.data_ptr() != self.view.data_ptr():  # somebody has set `grad.data`
                self.gradient = self.view.detach()
        self.parameter.grad = self.gradient if used else None
        self.hollow = not used

    def forget(self) -> None:
        """Drop all that may lie in the bucket's memory; nothing works then.

        The promise refers to the slot, so it would keep the memory until Python collects garbage.
        """
        del self.view, self.gradient, self.pending, self.kept, self.late


def _kept(mean: Tensor | None) -> Tensor:
    if mean is None:
        raise dropped_too_early()
    return mean


def slots_of_buckets(
    buckets: Sequence[Bucket],
    flats: Sequence[Tensor],
    share: float,
    average: Callable[[Slot], Tensor],
    writer: GradientWriter = DIRECT_WRITER,
    make: Callable[..., Slot] = Slot,
) -> list[list[Slot]]:
    """The slots of all parameters, by bucket; `make` takes the arguments of `Slot`."""
    return [
        [
            make(parameter, view, home, share, average, writer)
            for parameter, view in bucket.views(flat).items()
        ]
        for home, (bucket, flat) in enumerate(zip(buckets, flats, strict=True))
    ]


def gradient_like(parameter: Parameter) -> Tensor:
    """Memory for a gradient, with the dtype, device and strides that autograd gives it."""
    kept = torch.preserve_format if is_dense(parameter) else torch.contiguous_format
    return torch.empty_like(parameter.detach(), memory_format=kept)


def scaled(gradient: Tensor, share: float, view: Tensor) -> None:
    """Write a gradient of any layout and dtype, times the share, to a view."""
    if gradient.dtype is view.dtype and gradient.layout is torch.strided:
        torch.mul(gradient, share, out=view)
    elif gradient.layout is not torch.strided:
        view.zero_().add_(gradient, alpha=share)
    else:  # multiply in the view's wider dtype
        view.copy_(gradient).mul_(share)
