"""Sorts more rows than memory should hold, over all ranks.

A rank keeps rows in memory up to a limit. What is more is sorted and written to a file without a
name on the node, as a run. In the end each rank merges its runs block by block, together with what
the ranks below it in a binomial tree send. So rank 0 sees the rows of all ranks in order, and no
rank holds more than its limit and a few blocks. The method is the external merge sort of Knuth,
"The Art of Computer Programming", volume 3, section 5.4.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpc_train import files
from hpc_train.errors import DataError
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

NBYTES = 16  # of a complex number
KEPT_NUMBERS = 1 << 21  # numbers that a rank keeps in memory
BLOCK = 1 << 16  # numbers that are sent or merged at once
LEAST_BLOCK = 1 << 10  # numbers that are read at once from one of many runs
TAG = 23  # of messages with blocks

ComplexNumbers = NDArray[np.complex128]


class ExternalSort:
    """Sorts columns of complex numbers, each column by itself.

    Complex numbers are ordered as NumPy orders them: by the real part, and then by the imaginary
    part. None may be NaN.

    Args:
        columns: number of columns, at least 1.
        kept: how many numbers a rank keeps in memory, of all columns together.
    """

    def __init__(self, columns: int, kept: int = KEPT_NUMBERS) -> None:
        self._memory = np.empty((columns, max(1, kept // columns)), np.complex128)
        self._count = self._runs = 0
        self._file: BinaryIO | None = None

    def add(self, rows: ComplexNumbers) -> None:
        """Add rows, (N, columns), of this rank.

        Raises:
            DataError: the folder of temporary files cannot be written, or is full.
        """
        most = self._memory.shape[1]
        while len(rows):
            if self._count == most:
                self._write_run()
            some = rows[: most - self._count]
            self._memory[:, self._count : self._count + len(some)] = some.T
            self._count += len(some)
            rows = rows[len(some) :]

    def to_first(self, group: Group, consumers: Sequence[Callable[[ComplexNumbers], None]]) -> None:
        """Give the numbers of all ranks to rank 0, in order. Collective.

        Args:
            group: the ranks.
            consumers: of each column; it is called on rank 0 with sorted blocks, one after the
                other.

        Raises:
            DataError: a temporary file cannot be read; on all ranks.
            HpcTrainError: a consumer has failed; on all ranks.
        """
        parent, children = _neighbours(group)
        failure: Exception | None = None
        for column, consume in enumerate(consumers):
            incoming = [_received(group, child) for child in children]
            try:
                for block in merged([*self._sorted(column), *incoming]):
                    if parent is None:
                        consume(block)
                    else:
                        _send(group, block, parent)
            except Exception as error:  # noqa: BLE001  # the other ranks must hear of any error
                failure = error
            for stream in incoming:  # after a failure some of them have more to say
                for _ in stream:
                    pass
            if parent is not None:
                _send(group, np.empty(0, np.complex128), parent)
        settle(group, failure)

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()

    def _write_run(self) -> None:
        self._memory.sort(axis=1)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="hpc_train-")  # noqa: SIM115
            begin = self._runs * self._memory.nbytes
            files.write_at(self._file.fileno(), _bytes(self._memory), begin)
        except OSError as error:
            raise _failed("take", error) from None
        self._runs += 1
        self._count = 0

    def _sorted(self, column: int) -> list[Iterator[ComplexNumbers]]:
        """The runs of a column, and what is in memory of it."""
        mine = self._memory[column, : self._count]
        mine.sort()
        size = min(BLOCK, max(LEAST_BLOCK, KEPT_NUMBERS // 4 // max(1, self._runs)))
        found = [self._read_run(run, column, size) for run in range(self._runs)]
        return [*found, (mine[at : at + BLOCK] for at in range(0, len(mine), BLOCK))]

    def _read_run(self, run: int, column: int, size: int) -> Iterator[ComplexNumbers]:
        assert self._file is not None
        columns, count = self._memory.shape
        begin = (run * columns + column) * count
        for at in range(begin, begin + count, size):
            block = np.empty(min(size, begin + count - at), np.complex128)
            try:
                read = files.read_into(self._file.fileno(), _bytes(block), at * NBYTES)
            except OSError as error:
                raise _failed("give back", error) from None
            if read < block.nbytes:
                raise _failed("give back", OSError(0, "the file is shorter than it was"))
            yield block


def merged(streams: Sequence[Iterator[ComplexNumbers]]) -> Iterator[ComplexNumbers]:
    """Merge sorted numbers.

    Args:
        streams: each yields sorted blocks, not empty, one after the other.

    Yields:
        Sorted blocks of all numbers, one after the other.
    """
    heads = [(block, stream) for stream in streams if (block := next(stream, None)) is not None]
    while len(heads) > 1:
        # Whatever comes later is not below the last number of the block that ends first.
        bound = np.sort(np.stack([block[-1] for block, _ in heads]))[0]
        cuts = [int(np.searchsorted(block, bound, side="right")) for block, _ in heads]
        ready = [block[:cut] for (block, _), cut in zip(heads, cuts, strict=True)]
        yield np.sort(np.concatenate(ready), kind="stable")  # which is fast for sorted parts
        rest = [(block[cut:], stream) for (block, stream), cut in zip(heads, cuts, strict=True)]
        heads = []
        for block, stream in rest:
            more = block if len(block) else next(stream, None)
            if more is not None:
                heads.append((more, stream))
    for block, stream in heads:
        yield block
        yield from stream


def _neighbours(group: Group) -> tuple[int | None, list[int]]:
    """The rank above this one in a binomial tree, None for rank 0, and the ranks below it."""
    rank, size = group.rank, group.size
    lowest = rank & -rank or size  # the lowest bit that is set
    steps = [1 << bit for bit in range(size.bit_length()) if 1 << bit < lowest]
    below = [rank + step for step in steps if rank + step < size]
    return rank & (rank - 1) if rank else None, below


def _send(group: Group, block: ComplexNumbers, to: int) -> None:
    assert group.comm is not None
    with group.waiting("a rank that merges sorted rows"):
        group.comm.send(block, dest=to, tag=TAG)


def _received(group: Group, source: int) -> Iterator[ComplexNumbers]:
    """The blocks of another rank. An empty one is the last."""
    assert group.comm is not None
    while True:
        with group.waiting(f"the sorted rows of rank {source}"):
            block: ComplexNumbers = group.comm.recv(source=source, tag=TAG)
        if not len(block):
            return
        yield block


def _bytes(numbers: ComplexNumbers) -> memoryview:
    return numbers.view(np.uint8).reshape(-1).data


def _failed(how: str, error: OSError) -> DataError:
    folder = "the folder of temporary files"
    with suppress(OSError):  # there is none that can be written
        folder = tempfile.gettempdir()
    return DataError(
        f"{folder} cannot {how} predictions that are scored ({error.strerror})",
        "set TMPDIR to a folder on the node's own disk, with more room",
    )
