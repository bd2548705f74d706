"""The bytes of an extent in the tensors of a rank, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from hpc_train.checkpoint.fileformat import SIZES, Held, Layout, names_between
from hpc_train.sharding import Block, ShardSpec

Bytes = npt.NDArray[np.uint8]
Specs = Mapping[str, ShardSpec]


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor in an extent.

    Args:
        name: the tensor's.
        place: byte of the extent from which the block counts.
        block: where they lie.
    """

    name: str
    place: int
    block: Block

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.block.rows * self.block.length


def pieces_of(specs: Specs, layout: Layout, begin: int, end: int) -> list[Piece]:
    """What such parts have of the content's bytes from `begin` to `end`, in the file's order."""
    found = []
    for entry in names_between(layout, begin, end):
        spec = specs.get(entry.name)
        if spec is not None:
            first, last = max(begin, entry.begin), min(end, entry.end)
            size = SIZES[entry.dtype]
            blocks = spec.overlap(first - entry.begin, last - entry.begin, size)
            found += [Piece(entry.name, first - begin, block) for block in blocks]
    return found


def total(pieces: Iterable[Piece]) -> int:
    """Bytes of all pieces."""
    return sum(piece.nbytes for piece in pieces)


def rows_in(extent: Bytes, piece: Piece) -> Bytes:
    """A piece's bytes in an extent, (rows, length); the extent's own memory."""
    block, first = piece.block, piece.place + piece.block.place
    if block.rows == 1:
        return extent[first : first + block.length].reshape(1, -1)
    return as_strided(extent[first:], (block.rows, block.length), (block.stride, 1))


def pack(extent: Bytes, pieces: Iterable[Piece], packed: Bytes) -> None:
    """Copy pieces of an extent behind each other."""
    position = 0
    for piece in pieces:
        rows = packed[position : position + piece.nbytes].reshape(piece.block.rows, -1)
        rows[:] = rows_in(extent, piece)
        position += piece.nbytes


def unpack(packed: Bytes, pieces: Iterable[Piece], extent: Bytes) -> None:
    """Copy pieces that lie behind each other to their places in an extent."""
    position = 0
    for piece in pieces:
        rows = packed[position : position + piece.nbytes].reshape(piece.block.rows, -1)
        rows_in(extent, piece)[:] = rows
        position += piece.nbytes


class Parts:
    """What a rank holds, as bytes.

    Args:
        held: contiguous parts, by their tensors' names.
    """

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._device = {
            name: as_bytes(part.tensor)
            for name, part in held.items()
            if part.tensor.device.type != "cpu"
        }
        self._host: dict[str, Bytes] = {
            name: as_bytes(part.tensor).numpy()
            for name, part in held.items()
            if name not in self._device
        }

    def memory(self, pieces: list[Piece], nbytes: int) -> Bytes | None:
        """The tensor's own memory, if one piece is all of an extent of so many bytes."""
        if len(pieces) != 1 or pieces[0].nbytes != nbytes or pieces[0].name in self._device:
            return None
        return self._rows(pieces[0]).reshape(-1)

    def gather(self, pieces: Iterable[Piece], extent: Bytes) -> None:
        """Copy this rank's pieces to their places in an extent."""
        for piece in pieces:
            rows = rows_in(extent, piece)
            if piece.name in self._device:  # straight to memory that may be pinned
                torch.from_numpy(rows).copy_(self._on_device(piece))
            else:
                rows[:] = self._rows(piece)

    def pack(self, pieces: Iterable[Piece], packed: Bytes) -> None:
        """Copy this rank's pieces behind each other."""
        position = 0
        for piece in pieces:
            packed[position : position + piece.nbytes] = self._rows(piece).reshape(-1)
            position += piece.nbytes

    def scatter(self, extent: Bytes, pieces: Iterable[Piece]) -> None:
        """Copy pieces of an extent into this rank's tensors."""
        for piece in pieces:
            self._put(piece, rows_in(extent, piece))

    def unpack(self, packed: Bytes, pieces: Iterable[Piece]) -> None:
        """Copy pieces that lie behind each other into this rank's tensors."""
        position = 0
        for piece in pieces:
            rows = packed[position : position + piece.nbytes].reshape(piece.block.rows, -1)
            self._put(piece, rows)
            position += piece.nbytes

    def _rows(self, piece: Piece) -> Bytes:
        """A piece, (rows, length); on the host the tensor's own memory."""
        if piece.name in self._device:
            copied: Bytes = self._on_device(piece).cpu().numpy()
            return copied
        memory = self._host[piece.name][piece.block.local : piece.block.local + piece.nbytes]
        return memory.reshape(piece.block.rows, -1)

    def _on_device(self, piece: Piece) -> torch.Tensor:
        memory = self._device[piece.name]
        begin = piece.block.local
        return memory[begin : begin + piece.nbytes].view(piece.block.rows, -1)

    def _put(self, piece: Piece, rows: Bytes) -> None:
        if piece.name in self._device:
            self._on_device(piece).copy_(torch.from_numpy(np.ascontiguousarray(rows)))
        else:
            self._rows(piece)[:] = rows


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory, (bytes,) uint8."""
    return tensor.detach().view(-1).view(torch.uint8)
