"""Read extents and compare them with their hashes."""

from __future__ import annotations

import xxhash

from hpc_train import files
from hpc_train.checkpoint.fileformat import FileMap

PIECE = 1 << 20  # bytes, which stay in a core's cache between being read and being hashed


def read_extent(
    descriptor: int, layout: FileMap, number: int, expected: bytes, into: memoryview | None = None
) -> bool:
    """Read an extent; returns whether it is what its hash says.

    Args:
        descriptor: of the file.
        layout: of the file.
        number: the extent's.
        expected: its hash.
        into: memory for it; without any it is only compared.
    """
    begin, end = layout.extent(number)
    spare = memoryview(bytearray(min(PIECE, end - begin)))
    hashed = xxhash.xxh3_128()
    for first in range(begin, end, PIECE):
        last = min(first + PIECE, end)
        piece = spare if into is None else into[first - begin :]
        piece = piece[: last - first]
        if files.read_into(descriptor, piece, layout.data_start + first) < len(piece):
            return False
        hashed.update(piece)
    return hashed.digest() == expected
