"""Reads boxes of values by file offset: from contiguous variables, and from chunked ones.

Several threads may read at once. They share open files, and chunks that were decoded last.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train import files
from hpc_train.data.arrays.filters import unfiltered
from hpc_train.data.arrays.indexing import FileIndex
from hpc_train.data.arrays.stored import ChunkTable, Stored
from hpc_train.errors import DataError

MOST_OPEN = 128  # files that are kept open
CACHE_BYTES = 64 << 20  # of decoded chunks that are kept for the next samples
# A box of a contiguous variable consists of runs of bytes. One read takes several runs and the gaps
# between them, if that is at most GAPS times the bytes of the runs, or at most SMALL_SPAN bytes.
GAPS = 4
SMALL_SPAN = 1 << 18
OPEN_CHECK_SECONDS = 0.01  # between two looks whether an open file has changed
MANY_CHUNKS = 1 << 12  # boxes of more chunks look only for those that are stored


class _Open:
    """An open file. It is closed when neither the reader nor a thread holds it any more."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # which does not wait for a pipe
        self.descriptor = os.open(path, flags)
        self.checked = time.monotonic()  # when its size and time of change were looked at

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class BoxReader:
    """Reads boxes of the variables of some files.

    Args:
        indexes: the files, with their variables.
    """

    def __init__(self, indexes: Sequence[FileIndex]) -> None:
        self.indexes = list(indexes)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._chunks: OrderedDict[tuple[int, str, int], np.ndarray] = OrderedDict()
        self._cached = 0

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy in a worker, which opens the files itself."""
        return {"indexes": self.indexes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.indexes = state["indexes"]
        self._begin()

    def close(self) -> None:
        """Close the files, and forget the decoded chunks. They are opened again when needed."""
        with self._lock:
            self._open.clear()
            self._chunks.clear()
            self._cached = 0

    def read(self, number: int, name: str, begin: Sequence[int], out: np.ndarray) -> None:
        """Fill `out` with a box of values as they are in the file.

        Args:
            number: which file.
            name: which variable.
            begin: the box's first index along each axis.
            out: has the box's shape and the variable's type.

        Raises:
            DataError: the file cannot be read, has changed or is damaged.
        """
        stored = self.indexes[number].variables[name]
        if not out.size:
            return
        if stored.chunks is not None:
            self._read_chunks(number, name, stored, begin, out)
        elif stored.offset is None:
            out[...] = stored.fill
        else:
            file = self._file(number)
            if out.shape[1:] == stored.shape[1:] and out.flags.c_contiguous:  # whole rows
                self._fill(number, file, out, stored.offset + begin[0] * (out.nbytes // len(out)))
                return
            for place, offset, part in _spans(stored.shape, begin, out):
                if place.flags.c_contiguous and part is None:
                    self._fill(number, file, place, stored.offset + offset)
                else:
                    length, shape, strides = part or (place.size, place.shape, None)
                    flat = np.empty(length, stored.dtype)
                    self._fill(number, file, flat, stored.offset + offset)
                    place[...] = np.lib.stride_tricks.as_strided(flat, shape, strides)

    def _file(self, number: int) -> _Open:
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
                return found
        index = self.indexes[number]
        try:
            file = _Open(index.path)
        except OSError as error:
            raise DataError(f"{index.path}: {error.strerror}", "check the file system") from None
        self._check(number, file)
        with self._lock:
            self._open[number] = file
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return file

    def check(self) -> None:
        """Make sure that no file which is still open has changed until now.

        Raises:
            DataError: one has.
        """
        with self._lock:
            opened = [*self._open.items()]
        for number, file in opened:
            self._check(number, file)

    def _check(self, number: int, file: _Open) -> None:
        index = self.indexes[number]
        file.checked = time.monotonic()
        try:
            now = os.fstat(file.descriptor)
        except OSError as error:
            raise DataError(f"{index.path}: {error.strerror}", "check the file system") from None
        if (now.st_size, now.st_mtime_ns) != (index.file_bytes, index.mtime_ns):
            raise DataError(
                f"{index.path} has changed since it was indexed",
                "start the program again; a file that is read must not be written to",
            )

    def _fill(self, number: int, file: _Open, memory: np.ndarray, offset: int) -> None:
        path = self.indexes[number].path
        flat = memory.reshape(-1).view(np.uint8)
        try:
            count = files.read_into(file.descriptor, flat.data, offset)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}", "check the file system") from None
        if count < len(flat):
            raise DataError(f"{path} ends early", "it has become shorter; copy it again")
        if time.monotonic() > file.checked + OPEN_CHECK_SECONDS:
            self._check(number, file)

    def _read_chunks(
        self, number: int, name: str, stored: Stored, begin: Sequence[int], out: np.ndarray
    ) -> None:
        table = stored.chunks
        assert table is not None
        box = [slice(first, first + count) for first, count in zip(begin, out.shape, strict=True)]
        places, whole = _chunks_of(table, box)
        if not whole:
            out[...] = stored.fill
        for place in places:
            values = self._chunk(number, name, stored, place)
            source, target = [], []
            left = int(table.numbers[place])
            for length, grid, wanted in reversed([*zip(table.shape, table.grid, box, strict=True)]):
                left, n = divmod(left, grid)
                first = max(n * length, wanted.start)
                last = min((n + 1) * length, wanted.stop)
                source.append(slice(first - n * length, last - n * length))
                target.append(slice(first - wanted.start, last - wanted.start))
            out[tuple(reversed(target))] = values[tuple(reversed(source))]

    def _chunk(self, number: int, name: str, stored: Stored, place: int) -> np.ndarray:
        """The values of a chunk, from the last decoded ones or from the file."""
        key = (number, name, place)
        with self._lock:
            found = self._chunks.get(key)
            if found is not None:
                self._chunks.move_to_end(key)
                return found
        table = stored.chunks
        assert table is not None
        data = np.empty(int(table.sizes[place]), np.uint8)
        self._fill(number, self._file(number), data, int(table.offsets[place]))
        nbytes = math.prod(table.shape) * stored.dtype.itemsize
        try:
            flat = unfiltered(data.data, table.filters, int(table.masks[place]), nbytes)
        except ValueError as error:
            raise DataError(
                f"{self.indexes[number].path}: variable {name}: the chunk at byte "
                f"{table.offsets[place]} is damaged: {error}",
                "copy the file again",
            ) from None
        values = flat.view(stored.dtype).reshape(table.shape)
        if table.filters and nbytes <= CACHE_BYTES:
            self._keep(key, values)
        return values

    def _keep(self, key: tuple[int, str, int], values: np.ndarray) -> None:
        with self._lock:
            if key not in self._chunks:
                self._chunks[key] = values
                self._cached += values.nbytes
            while self._cached > CACHE_BYTES:
                self._cached -= self._chunks.popitem(last=False)[1].nbytes


_Part = tuple[int, tuple[int, ...], tuple[int, ...]]


def _spans(
    shape: tuple[int, ...], begin: Sequence[int], out: np.ndarray
) -> Iterator[tuple[np.ndarray, int, _Part | None]]:
    """The pieces of a box of a contiguous variable that are read at once.

    Yields the part of `out` that is filled, and its offset in bytes. If the piece has gaps, it
    yields the number of its values, too, and the shape and the strides of those that are wanted.
    """
    item = out.dtype.itemsize
    strides = [item * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = len(shape) - 1
    while axis and out.shape[axis] == shape[axis]:
        axis -= 1
    outer, part = axis, None
    if axis:
        run = out.shape[axis] * strides[axis]
        span = (out.shape[axis - 1] - 1) * strides[axis - 1] + run
        if span <= max(GAPS * out.shape[axis - 1] * run, SMALL_SPAN):
            outer = axis - 1
            part = (span // item, out.shape[outer:], tuple(strides[outer:]))
    base = sum(first * stride for first, stride in zip(begin, strides, strict=True))
    for index in product(*map(range, out.shape[:outer])):
        offset = base + sum(n * stride for n, stride in zip(index, strides, strict=False))
        yield out[index], offset, part


def _chunks_of(table: ChunkTable, box: Sequence[slice]) -> tuple[list[int], bool]:
    """The places in a table of the chunks of a box, and whether the box has no others."""
    lows = [one.start // length for one, length in zip(box, table.shape, strict=True)]
    highs = [-(-one.stop // length) for one, length in zip(box, table.shape, strict=True)]
    every = len(table.numbers) == math.prod(table.grid)  # then each chunk is in its place
    if every and all(high - low == 1 for low, high in zip(lows, highs, strict=True)):
        place = 0
        for low, length in zip(lows, table.grid, strict=True):
            place = place * length + low
        return [place], True
    count = math.prod(high - low for low, high in zip(lows, highs, strict=True))
    if count <= MANY_CHUNKS:
        wanted = np.zeros(1, np.int64)
        for low, high, length in zip(lows, highs, table.grid, strict=True):
            wanted = (wanted[:, None] * length + np.arange(low, high)).reshape(-1)
        if every:
            return wanted.tolist(), True
        places = np.searchsorted(table.numbers, wanted)
        inside = places < len(table.numbers)
        inside[inside] = table.numbers[places[inside]] == wanted[inside]
        return places[inside].tolist(), bool(inside.all())
    ends = [0, 0]
    for low, high, length in zip(lows, highs, table.grid, strict=True):
        ends = [ends[0] * length + low, ends[1] * length + high - 1]
    first, last = np.searchsorted(table.numbers, [ends[0], ends[1] + 1])
    inside = np.ones(last - first, bool)
    for n, low, high in zip(
        np.unravel_index(table.numbers[first:last], table.grid), lows, highs, strict=True
    ):
        inside &= (n >= low) & (n < high)
    places = first + np.flatnonzero(inside)
    return places.tolist(), len(places) == count
