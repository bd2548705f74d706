"""Flat buckets: large contiguous buffers that the averaged gradients are views of.

A model has hundreds of gradients, and a collective call costs its latency each time. Gradients
that lie side by side in a few buffers are averaged in a few calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Slab:
    """Rows of a parameter, as many as lie in one rank's part of a bucket.

    Args:
        parameter: the whole parameter.
        first, last: from row `first` to before row `last` of its first dimension; of a parameter
            without dimensions 0 and 1.
        begin: where they begin in the bucket, in elements.
    """

    parameter: Parameter
    first: int
    last: int
    begin: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these rows."""
        return (self.last - self.first, *self.parameter.shape[1:]) if self.parameter.dim() else ()

    def rows_of(self, whole: Tensor) -> Tensor:
        """The slab's elements in a tensor of the whole parameter's shape."""
        return whole[self.first : self.last] if whole.dim() else whole

    def of(self, flat: Tensor) -> Tensor:
        """The slab's elements in a buffer of the whole bucket, in its shape."""
        count = (self.last - self.first) * _row(self.parameter)
        return flat[self.begin : self.begin + count].view(self.shape)


class Bucket:
    """The parameters whose gradients lie in one buffer, one behind the other.

    Args:
        parameters: in their order, of one dtype and device.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self.begins = [0, *accumulate(sizes)]
        self.numel = self.begins.pop()
        self.dtype, self.device = parameters[0].dtype, parameters[0].device

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.numel * self.dtype.itemsize

    def views(self, flat: Tensor) -> dict[Parameter, Tensor]:
        """Each parameter's part of the buffer, in its shape."""
        pairs = zip(self.parameters, self.begins, strict=True)
        return {p: flat[begin : begin + p.numel()].view(p.shape) for p, begin in pairs}

    def cuts(self, parts: int) -> list[int]:
        """Where the buffer is cut into parts of nearly one size, between rows of parameters.

        Returns:
            parts + 1 positions, the first 0, the last numel.
        """
        return [self._row_near(self.numel * part // parts) for part in range(parts + 1)]

    def slabs(self, begin: int, end: int) -> list[Slab]:
        """What lies between two cuts."""
        found = []
        for parameter, start in zip(self.parameters, self.begins, strict=True):
            row = _row(parameter)
            first = max(0, begin - start) // row if row else 0
            last = min(parameter.numel(), end - start) // row if row else 0
            if first < last:
                found.append(Slab(parameter, first, last, start + first * row))
        return found

    def _row_near(self, position: int) -> int:
        for parameter, start in zip(self.parameters, self.begins, strict=True):
            if start <= position < start + parameter.numel():
                row = _row(parameter)
                return start + round((position - start) / row) * row
        return position


def _row(parameter: Parameter) -> int:
    """Elements of a row."""
    return parameter.numel() // parameter.shape[0] if parameter.numel() and parameter.dim() else 1


def plan(parameters: Sequence[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Distribute parameters over buckets in reverse order, about that of the backward pass.

    Args:
        parameters: those that require a gradient; a bucket holds one dtype and device only.
        bucket_bytes: a bucket is closed before it would hold more; a larger parameter has its own.
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
