"""Which part of a global tensor a rank holds: pure arithmetic, no tensors and no ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True)
class StridedBlock:
    """Equal pieces of memory, at regular distances in the global tensor, in a row in the shard.

    Args:
        place: first element, counted from the start of the range that was asked for.
        local: the same element's place in the shard.
        rows: number of pieces.
        length: elements of each.
        stride: elements from one piece's begin to the next one's in the global tensor.
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
        shape: of the global tensor.
        dim: the dimension that is cut.
        start, stop: the part of it.
        first, last: of a tensor that is cut along another dimension than its first, only these
            of the first one's indices; last 0 stands for all.
    """

    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    stop: int = 1
    first: int = 0
    last: int = 0

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> SliceSpec:
        """All of a tensor."""
        return cls(shape, 0, 0, shape[0] if shape else 1)

    @classmethod
    def part(cls, shape: tuple[int, ...], dim: int, index: int, parts: int) -> SliceSpec:
        """The index-th of equal parts along a dimension, which may be counted from the end.

        Raises:
            ValueError: the dimension is not divisible.
        """
        dim %= len(shape)
        size, rest = divmod(shape[dim], parts)
        if rest:
            raise ValueError(f"dimension {dim} of {list(shape)} is not divisible by {parts}")
        return cls(shape, dim, index * size, (index + 1) * size)

    def rows(self, first: int, last: int) -> SliceSpec:
        """Of this part, the indices from `first` to before `last` of its first dimension."""
        if self.dim == 0:
            return replace(self, start=self.start + first, stop=self.start + last)
        if first == last:  # last 0 would stand for all
            return replace(self, stop=self.start)
        return replace(self, first=first, last=last)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shard's shape."""
        if not self.shape:
            return ()
        cut = (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])
        return (self.last - self.first, *cut[1:]) if self.last else cut

    @property
    def has_origin(self) -> bool:
        """Whether the tensor's first element is in this part."""
        return self.start == 0 and self.first == 0

    def ranges(self) -> dict[int, tuple[int, int]]:
        """The indices of this part along the dimensions that are cut."""
        ranges = {0: (self.first, self.last)} if self.last else {}
        return ranges | {self.dim: (self.start, self.stop)}

    def overlap(self, begin: int, end: int, itemsize: int = 1) -> list[StridedBlock]:
        """The shard's pieces in a range of the global tensor's memory: at most three blocks.

        Args:
            begin: the range's first place, in elements, or in bytes if `itemsize` is given.
            end: the place behind it.
            itemsize: of an element; the blocks are counted in the same unit as the range.
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
        """The part's first place in the global tensor's memory and the one behind its last.

        Both are 0 for a part of no elements; `itemsize` is as in `overlap`.
        """
        rows, stride, offset, length = self._rows(itemsize)
        return (offset, offset + (rows - 1) * stride + length) if rows * length else (0, 0)

    def _rows(self, itemsize: int) -> tuple[int, int, int, int]:
        """Number of contiguous pieces, distance, first one's begin, and length of each."""
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
    """What a rank holds of one of the model's tensors.

    Args:
        name: the tensor's name in the whole model.
        spec: which part.
        owned: whether this rank speaks for the part: of the ranks of one replica that hold the
            same, one does.
    """

    name: str
    spec: SliceSpec
    owned: bool = True
