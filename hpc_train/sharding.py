"""Describes which slice of a global tensor a rank holds, by arithmetic without torch and MPI."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True)
class StridedBlock:
    """Pieces of memory of equal length.

    They lie at regular distances in the global tensor, and one behind the other in the slice.

    Args:
        place: position of the first element, counted from the start of the requested range.
        local: position of the same element in the slice.
        rows: number of pieces.
        length: number of elements of each piece.
        stride: number of elements from the start of one piece to the next in the global tensor.
    """

    place: int
    local: int
    rows: int
    length: int
    stride: int


@dataclass(frozen=True)
class SliceSpec:
    """The slice `start` to `stop` of a global tensor along one dimension; row-major.

    Args:
        shape: shape of the global tensor.
        dim: the dimension that is cut.
        start, stop: the slice has the indices `start` to `stop` - 1 of that dimension.
        first, last: if `dim` is not 0, the slice only has the indices `first` to `last` - 1 of
            dimension 0; a `last` of 0 stands for all indices.
    """

    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    stop: int = 1
    first: int = 0
    last: int = 0

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> SliceSpec:
        """The slice that is all of a tensor."""
        return cls(shape, 0, 0, shape[0] if shape else 1)

    @classmethod
    def part(cls, shape: tuple[int, ...], dim: int, index: int, parts: int) -> SliceSpec:
        """Slice number `index` of equal slices along a dimension.

        Args:
            shape: shape of the global tensor.
            dim: the dimension; a negative one counts from the end.
            index: the slice's number, from 0.
            parts: number of slices.

        Raises:
            ValueError: the dimension is not divisible by `parts`.
        """
        dim %= len(shape)
        size, rest = divmod(shape[dim], parts)
        if rest:
            raise ValueError(f"dimension {dim} of {list(shape)} is not divisible by {parts}")
        return cls(shape, dim, index * size, (index + 1) * size)

    def rows(self, first: int, last: int) -> SliceSpec:
        """The part of this slice with the indices `first` to `last` - 1 of its first dimension."""
        if self.dim == 0:
            return replace(self, start=self.start + first, stop=self.start + last)
        if first == last:  # last 0 would stand for all
            return replace(self, stop=self.start)
        return replace(self, first=first, last=last)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        if not self.shape:
            return ()
        cut = (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])
        return (self.last - self.first, *cut[1:]) if self.last else cut

    @property
    def has_origin(self) -> bool:
        """Whether the tensor's first element is in this slice."""
        return self.start == 0 and self.first == 0

    def ranges(self) -> dict[int, tuple[int, int]]:
        """For each dimension that is cut, the first index of this slice and the one after it."""
        ranges = {0: (self.first, self.last)} if self.last else {}
        return ranges | {self.dim: (self.start, self.stop)}

    def overlap(self, begin: int, end: int, itemsize: int = 1) -> list[StridedBlock]:
        """The slice's pieces in a range of the global tensor's memory: at most three blocks.

        The first and the last piece can be cut off by the range; all others are equal.

        Args:
            begin: first position of the range, in elements; in bytes if `itemsize` is given.
            end: the position after its last one.
            itemsize: bytes of an element. The blocks have the same unit as the range.
        """
        rows, stride, offset, length = self._rows(itemsize)
        if not length:
            return []
        if rows == 1:
            low, high = max(begin, offset), min(end, offset + length)
            return (
                [StridedBlock(low - begin, low - offset, 1, high - low, stride)]
                if low < high
                else []
            )
        first = max(0, (begin - offset - length) // stride + 1)
        last = min(rows, -((offset - end) // stride))

        def block(row: int, count: int) -> StridedBlock:
            start = row * stride + offset
            low, high = max(begin, start), min(end, start + length)
            return StridedBlock(low - begin, row * length + low - start, count, high - low, stride)

        if last - first <= 2:
            return [block(row, 1) for row in range(first, last)]
        return [block(first, 1), block(first + 1, last - first - 2), block(last - 1, 1)]

    def span(self, itemsize: int = 1) -> tuple[int, int]:
        """The range of the global tensor's memory that has the slice: its start and its end.

        Both are 0 for a slice without elements. `itemsize` is as in `overlap`.
        """
        rows, stride, offset, length = self._rows(itemsize)
        return (offset, offset + (rows - 1) * stride + length) if rows * length else (0, 0)

    def _rows(self, itemsize: int) -> tuple[int, int, int, int]:
        """Number of contiguous pieces, their distance, start of the first, and their length."""
        cut = self.shape[self.dim] if self.shape else 1
        outer = prod(self.shape[: self.dim])
        inner = prod(self.shape[self.dim + 1 :]) * itemsize
        skipped = 0
        if self.last:
            each = prod(self.shape[1 : self.dim])
            outer, skipped = (self.last - self.first) * each, self.first * each * cut * inner
        if self.stop - self.start == cut:
            return 1, outer * cut * inner, skipped, outer * cut * inner
        return outer, cut * inner, skipped + self.start * inner, (self.stop - self.start) * inner


@dataclass(frozen=True)
class ParameterSlice:
    """The slice of one of the model's tensors that a rank holds.

    Args:
        name: the tensor's name in the whole model.
        spec: the slice.
        owned: whether this rank counts and saves the slice. If several ranks of a replica hold the
            same slice, one of them owns it.
    """

    name: str
    spec: SliceSpec
    owned: bool = True
