"""Flat buckets: large contiguous buffers that the averaged gradients are views of.

A model has hundreds of gradients, and a collective call costs its latency each time. Gradients
that lie side by side in a few buffers are averaged in a few calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Slab:
    """The rows of a parameter that lie in one rank's part of a bucket.

    Args:
        parameter: the whole parameter.
        first, last: rows `first` to `last` - 1 along its first dimension; 0 and 1 for a parameter
            without dimensions.
        begin: position of row `first` in the bucket, in elements.
    """

    parameter: Parameter
    first: int
    last: int
    begin: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these rows."""
        return (self.last - self.first, *self.parameter.shape[1:]) if self.parameter.dim() else ()

    @property
    def place(self) -> int:
        """The position of row `first` in the parameter, in elements."""
        return self.first * _row(self.parameter)

    def rows_of(self, whole: Tensor) -> Tensor:
        """The slab's rows of a tensor that has the whole parameter's shape."""
        return whole[self.first : self.last] if whole.dim() else whole

    def of(self, flat: Tensor) -> Tensor:
        """A view of the slab's elements in the whole bucket's buffer, in the slab's shape."""
        count = (self.last - self.first) * _row(self.parameter)
        return flat[self.begin : self.begin + count].view(self.shape)


class Bucket:
    """The parameters whose gradients lie in one buffer, one behind the other.

    The buffer has 32 bits or more per number, so that sums of 16-bit gradients are not rounded to
    16 bits. For complex parameters it holds the real and the imaginary parts.

    Args:
        parameters: in the order in which they lie in the buffer, of one dtype and device.
        by_rows: whether gradients lie there row by row, as `Slab` needs it. Otherwise the gradient
            of a dense parameter has the parameter's strides.
        summed: whether gradients are added up there. Otherwise the buffer holds the parameters
            themselves, in their own dtype.
    """

    def __init__(
        self, parameters: Sequence[Parameter], *, by_rows: bool = False, summed: bool = True
    ) -> None:
        self.parameters = tuple(parameters)
        self.by_rows = by_rows
        self.device = parameters[0].device
        """The device of the buffer."""
        of_parameters = parameters[0].dtype
        wide = torch.promote_types(of_parameters, torch.float32) if summed else of_parameters
        self.dtype = wide.to_real()
        """The dtype of the buffer."""
        units = 2 if of_parameters.is_complex else 1
        self._sizes = [units * parameter.numel() for parameter in parameters]
        self.begins = [0, *accumulate(self._sizes)]
        self.numel = self.begins.pop()
        self._of_view = torch.promote_types(of_parameters, self.dtype)

    def on(self, device: torch.device) -> Bucket:
        """The same bucket with its buffer on another device than its parameters."""
        other = copy(self)
        other.device = device
        return other

    def pieces(self, most: int) -> list[Bucket]:
        """Cut the buffer into buckets of `most` bytes or fewer, which know no parameters.

        If it is no larger, it stays as it is.
        """
        if self.nbytes <= most:
            return [self]
        size, found = max(1, most // self.dtype.itemsize), []
        for begin in range(0, self.numel, size):
            piece = copy(self)
            piece.parameters, piece.begins, piece._sizes = (), [], []
            piece.numel = min(size, self.numel - begin)
            found.append(piece)
        return found

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.numel * self.dtype.itemsize

    def views(self, flat: Tensor) -> dict[Parameter, Tensor]:
        """For each parameter, a view of its part of the buffer, in its shape."""
        found = {}
        for p, begin, size in zip(self.parameters, self.begins, self._sizes, strict=True):
            part = flat[begin : begin + size].view(self._of_view)
            keeps = is_dense(p) and not self.by_rows
            found[p] = part.as_strided(p.shape, p.stride()) if keeps else part.view(p.shape)
        return found

    def ranges(self) -> list[tuple[Parameter, int, int]]:
        """Each parameter with the start and the end of its part of the buffer, in elements."""
        ends = [*self.begins[1:], self.numel]
        return list(zip(self.parameters, self.begins, ends, strict=True))

    def cuts(self, parts: int) -> list[int]:
        """Cut the buffer into parts of nearly equal size, between rows of parameters.

        Returns:
            parts + 1 positions in elements; the first is 0, the last is numel.
        """
        return [self._row_near(self.numel * part // parts) for part in range(parts + 1)]

    def slabs(self, begin: int, end: int) -> list[Slab]:
        """The slabs that lie between two cuts."""
        found = []
        for parameter, start in zip(self.parameters, self.begins, strict=True):
            row = _row(parameter)
            first = max(0, begin - start) // row if row else 0
            last = min(parameter.numel(), end - start) // row if row else 0
            if first < last:
                found.append(Slab(parameter, first, last, start + first * row))
        return found

    def _row_near(self, position: int) -> int:
        for parameter, start, size in zip(self.parameters, self.begins, self._sizes, strict=True):
            if start <= position < start + size:
                row = _row(parameter)
                return start + round((position - start) / row) * row
        return position


def _row(parameter: Parameter) -> int:
    """Number of elements in a row."""
    return parameter.numel() // parameter.shape[0] if parameter.numel() and parameter.dim() else 1


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill their memory without gaps or overlaps, in any order.

    Autograd gives the gradient of a dense parameter the parameter's strides, and any other gradient
    row-major strides. Fused optimizers rely on this, because they ignore strides.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def has_slabs(parameter: Parameter) -> bool:
    """Whether a parameter can be cut into slabs.

    It has elements, and is row-major and real. If it is trained, each has 32 bits or more, as sums
    of gradients do.
    """
    wide = parameter.dtype in (torch.float32, torch.float64)
    fits = wide or (parameter.is_floating_point() and not parameter.requires_grad)
    return fits and parameter.is_contiguous() and parameter.numel() > 0


def plan_buckets(parameters: Sequence[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Distribute parameters over buckets, in reverse order.

    The backward pass makes gradients in about this order, so the first buckets are full early.

    Args:
        parameters: those that require gradients; a bucket holds one dtype and device only.
        bucket_bytes: largest size of a bucket; a larger parameter gets a bucket of its own.
    """
    groups: list[list[Parameter]] = []
    for parameter in reversed(parameters):
        if not groups or not _fits(groups[-1], parameter, bucket_bytes):
            groups.append([])
        groups[-1].append(parameter)
    return groups


def _fits(group: Sequence[Parameter], parameter: Parameter, bucket_bytes: int) -> bool:
    alike = (parameter.dtype, parameter.device) == (group[0].dtype, group[0].device)
    return alike and sum(p.nbytes for p in group) + parameter.nbytes <= bucket_bytes
