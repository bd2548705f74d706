"""One gzip file of the parts that all ranks have: each compresses its own, and rank 0 writes.

The parts are pieces of one compressed stream, as pigz makes them in threads: each is compressed for
itself and ends at a byte. So readers find a plain gzip file (RFC 1952) with one member.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hpc_train import files
from hpc_train.mpi.group import Group

GZIP_HEADER = bytes(
    [0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF]
)  # deflate, no name, no time, any system
LAST_BLOCK = bytes([3, 0])  # an empty block that ends a compressed stream
POLYNOMIAL = 0xEDB88320  # of CRC-32, with the highest power's bit last
PARTS_WAIT = "the parts of a trace"


class DeflatePiece(NamedTuple):
    """A piece of a compressed stream.

    Args:
        data: the compressed bytes.
        crc: the CRC-32 of the plain bytes.
        size: number of plain bytes.
    """

    data: bytes
    crc: int
    size: int


def deflated(plain: bytes) -> DeflatePiece:
    """Compress a piece."""
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    data = deflate.compress(plain) + deflate.flush(zlib.Z_FULL_FLUSH)
    return DeflatePiece(data, zlib.crc32(plain), len(plain))


def _times(one: int, other: int) -> int:
    """The product of two polynomials modulo CRC-32's."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = (other >> 1) ^ (POLYNOMIAL if other & 1 else 0)
    return product


@cache
def _power(doublings: int) -> int:
    """The polynomial x^(2^doublings) modulo CRC-32's."""
    return _times(_power(doublings - 1), _power(doublings - 1)) if doublings else 1 << 30


def joined_crc(first: int, second: int, size: int) -> int:
    """The CRC-32 of two pieces together, as zlib's crc32_combine.

    Args:
        first: CRC-32 of the first piece.
        second: CRC-32 of the second one.
        size: number of bytes of the second one.
    """
    for bit in range(size.bit_length()):
        if size >> bit & 1:
            first = _times(_power(bit + 3), first)  # a byte has 2^3 bits
    return first ^ second


class GzipWriter:
    """Writes pieces to a gzip file, which gets its name when it is complete.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = files.call("create", os.open, self._partial, flags, 0o666)
        self._offset = self._crc = self._size = 0
        try:
            self._put(GZIP_HEADER)
        except OSError:
            self.give_up()
            raise

    def write(self, piece: DeflatePiece) -> None:
        """Write the next piece."""
        self._put(piece.data)
        self._crc = joined_crc(self._crc, piece.crc, piece.size)
        self._size += piece.size

    def _put(self, data: bytes) -> None:
        files.write_at(self._descriptor, data, self._offset)
        self._offset += len(data)

    def finish(self) -> None:
        """End the file, and give it its name."""
        self._put(LAST_BLOCK + struct.pack("<II", self._crc, self._size & 0xFFFFFFFF))
        os.close(self._descriptor)
        self._partial.replace(self.path)

    def give_up(self) -> None:
        """Remove the incomplete file."""
        with suppress(OSError):
            os.close(self._descriptor)
        with suppress(OSError):
            self._partial.unlink()


def write_parts(
    group: Group, path: Path, make: Callable[[], bytes], begin: bytes, end: bytes
) -> Exception | None:
    """Write a file of all ranks' parts. Collective.

    Rank 0 has one other rank's part in memory at a time.

    Args:
        group: the ranks; their parts come in their order.
        path: the file. It is gzip.
        make: makes this rank's part.
        begin: what comes before all parts; rank 0's counts.
        end: what comes after all parts; rank 0's counts.

    Returns:
        The error that kept this rank's part out of the file, or on rank 0 the one that kept the
        file from being written. None: the file has the part.
    """
    piece, failure = DeflatePiece(b"", 0, 0), None
    try:
        piece = deflated(make())
    except Exception as error:  # noqa: BLE001  # rank 0 waits for the part of each rank
        failure = error
    if group.rank:
        assert group.comm is not None
        with group.waiting(PARTS_WAIT):
            # Synchronous: nothing is sent before rank 0 has room for it.
            group.comm.Ssend(array("q", [len(piece.data), piece.crc, piece.size]), 0)
            group.comm.Ssend(piece.data, 0)
        return failure
    return _written(group, path, [deflated(begin), piece], deflated(end)) or failure


def _written(
    group: Group, path: Path, first: list[DeflatePiece], last: DeflatePiece
) -> OSError | None:
    """Write the parts on rank 0; returns the error that kept the file from being written."""
    writer, failure = None, None

    def write(some: DeflatePiece) -> None:
        nonlocal failure
        try:
            if failure is None and writer is not None:
                writer.write(some)
        except OSError as error:
            failure = error  # the others still want to get rid of their parts

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = GzipWriter(path)
    except OSError as error:
        failure = error
    for piece in first:
        write(piece)
    about = array("q", [0, 0, 0])
    for rank in range(1, group.size):
        assert group.comm is not None
        with group.waiting(PARTS_WAIT):
            group.comm.Recv(about, rank)
            data = bytearray(about[0])
            group.comm.Recv(data, rank)
        write(DeflatePiece(bytes(data), about[1], about[2]))
    write(last)
    try:
        if failure is None and writer is not None:
            writer.finish()
    except OSError as error:
        failure = error
    if failure is not None and writer is not None:
        writer.give_up()
    return failure
