"""The bytes of all files, one file after the other, cut into chunks of one size.

Each chunk can be read and written by itself, at any time and in any order: its place in the stream
says which bytes of which files it has. So several threads can read and write at the same time.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from hpc_train import files
from hpc_train.errors import UserError
from hpc_train.staging.listing import Item, Listing, unreadable

LEAST, MOST = 1 << 16, 1 << 20  # bytes of a chunk


def chunk_bytes(total: int, nodes: int) -> int:
    """The size of a chunk: eight chunks of the stream for each node, within bounds.

    The last node gets the first chunk after nodes - 2 others have passed on it. With eight times as
    many chunks this adds an eighth to the time of the transfer. A chunk of less than LEAST bytes
    takes as long as one of LEAST, because of what each message costs.
    """
    return min(MOST, max(LEAST, total // (8 * nodes)))


class Portion(NamedTuple):
    """A run of bytes of one file in one chunk.

    Args:
        item: the file.
        offset: of the first byte in the file.
        at: of the first byte in the chunk.
        nbytes: how many there are.
    """

    item: Item
    offset: int
    at: int
    nbytes: int


class Stream:
    """Where the bytes of files lie in the stream.

    Args:
        items: the table; only its files have bytes.
        chunk: bytes of a chunk; the last one may have fewer.
    """

    def __init__(self, items: Sequence[Item], chunk: int) -> None:
        self.chunk = chunk
        self._files = [item for item in items if item.nbytes]
        self._begins = [0, *accumulate(item.nbytes for item in self._files)]

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return self._begins[-1]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.total // self.chunk)

    def nbytes(self, number: int) -> int:
        """Bytes of a chunk."""
        return min(self.chunk, self.total - number * self.chunk)

    def portions(self, number: int) -> Iterator[Portion]:
        """What a chunk consists of."""
        begin = number * self.chunk
        end = begin + self.nbytes(number)
        place = begin
        index = bisect_right(self._begins, begin) - 1
        while place < end:
            until = min(end, self._begins[index + 1])
            yield Portion(
                self._files[index], place - self._begins[index], place - begin, until - place
            )
            place, index = until, index + 1


class Source:
    """Reads chunks from the folders that are copied.

    Args:
        listing: what they had when they were listed.
        stream: the chunks.
    """

    def __init__(self, listing: Listing, stream: Stream) -> None:
        self.listing, self.stream = listing, stream

    def read(self, number: int, memory: memoryview) -> None:
        """Read a chunk.

        Args:
            number: which one.
            memory: takes it; it has the chunk's size.

        Raises:
            UserError: a file cannot be read, or is another one than was listed.
        """
        for portion in self.stream.portions(number):
            part = memory[portion.at : portion.at + portion.nbytes]
            made = self.listing.rewritten.get(portion.item.path)
            if made is not None:
                part[:] = made[portion.offset : portion.offset + portion.nbytes]
            else:
                _read(Path(self.listing.source(portion.item.path)), portion, part)


def _read(path: Path, portion: Portion, memory: memoryview) -> None:
    try:
        with files.opened(path) as descriptor:
            count = files.read_into(descriptor, memory, portion.offset)
            about = os.fstat(descriptor)
    except OSError as error:
        error.filename = path
        raise unreadable(error) from None
    now, then = (about.st_size, about.st_mtime_ns), (portion.item.size, portion.item.mtime_ns)
    if count < portion.nbytes or now != then:
        raise UserError(
            f"{path} has changed while it was copied",
            "stage again when nothing writes there",
        )
