"""Copies bytes between extents and the tensors of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from hpc_train.checkpoint.fileformat import DTYPE_BYTES, FileMap, LocalTensor, names_between
from hpc_train.sharding import SliceSpec, StridedBlock

Bytes = npt.NDArray[np.uint8]
Specs = Mapping[str, SliceSpec]


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor in an extent.

    Args:
        name: of the tensor.
        place: the byte of the extent from which the block's places are counted.
        block: where the bytes lie in the extent and in the rank's part of the tensor.
    """

    name: str
    place: int
    block: StridedBlock

    @property
    def first(self) -> int:
        """The byte of the extent at which the piece begins."""
        return self.place + self.block.place

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.block.rows * self.block.length


def pieces_of(specs: Specs, layout: FileMap, begin: int, end: int) -> list[Piece]:
    """The pieces that parts of tensors have of a range of the content, in the file's order.

    Args:
        specs: the parts, by their tensors' names.
        layout: of the file.
        begin: the first byte of the range, counted from data_start.
        end: the byte behind the last one.
    """
    found = []
    for entry in names_between(layout, begin, end):
        spec = specs.get(entry.name)
        if spec is not None:
            first, last = max(begin, entry.begin), min(end, entry.end)
            size = DTYPE_BYTES[entry.dtype]
            blocks = spec.overlap(first - entry.begin, last - entry.begin, size)
            found += [Piece(entry.name, first - begin, block) for block in blocks]
    return found


def total(pieces: Iterable[Piece | Strip]) -> int:
    """Bytes of all pieces."""
    return sum(piece.nbytes for piece in pieces)


def rows_in(extent: Bytes, piece: Piece) -> Bytes:
    """A piece's bytes in an extent, (rows, length). It is a view of the extent."""
    block, first = piece.block, piece.first
    if block.rows == 1:
        return extent[first : first + block.length].reshape(1, -1)
    return as_strided(extent[first:], (block.rows, block.length), (block.stride, 1))


def pack(extent: Bytes, pieces: Iterable[Piece], packed: Bytes) -> None:
    """Copy pieces of an extent to `packed`, one behind the other."""
    position = 0
    for piece in pieces:
        rows = packed[position : position + piece.nbytes].reshape(piece.block.rows, -1)
        rows[:] = rows_in(extent, piece)
        position += piece.nbytes


def unpack_pieces(packed: Bytes, pieces: Iterable[Piece], extent: Bytes) -> None:
    """Copy pieces that lie in `packed`, one behind the other, to their places in an extent."""
    position = 0
    for piece in pieces:
        rows = packed[position : position + piece.nbytes].reshape(piece.block.rows, -1)
        rows_in(extent, piece)[:] = rows
        position += piece.nbytes


@dataclass(frozen=True)
class Strip:
    """Pieces that are copied in one call: each has one row, they are adjacent, and on the host.

    Args:
        first: the byte of the extent at which the first piece begins.
        nbytes: of all pieces.
        names: of the pieces' tensors.
        cuts: for each piece that is less than the rank's part of its tensor, the piece's place in
            `names` and its bytes in that part.
    """

    first: int
    nbytes: int
    names: tuple[str, ...]
    cuts: tuple[tuple[int, slice], ...]


class Parts:
    """The bytes of the tensors that a rank holds.

    Args:
        held: the rank's parts, contiguous, by their tensors' names.
    """

    def __init__(self, held: Mapping[str, LocalTensor]) -> None:
        self.held = dict(held)
        self._bytes: dict[str, torch.Tensor] = {}
        self._host: dict[str, Bytes] = {}
        self._device: dict[str, torch.Tensor] = {}
        for name, part in held.items():
            self.put(name, part)

    def put(self, name: str, part: LocalTensor) -> None:
        """Put a tensor in place of a name's former one, of the same form and device, if any."""
        self.held[name] = part
        memory = self._bytes[name] = as_bytes(part.tensor)
        if part.tensor.device.type == "cpu":
            self._host[name] = memory.numpy()
        else:
            self._device[name] = memory

    def drop(self, name: str) -> None:
        """Release a name's tensor until another one is put in its place."""
        for known in (self.held, self._bytes, self._host, self._device):
            known.pop(name, None)

    def size(self, name: str) -> int:
        """Bytes of this rank's part of a tensor."""
        return self._bytes[name].numel()

    def flat(self, names: Sequence[str]) -> torch.Tensor:
        """The bytes of some tensors, one behind the other, (bytes,) uint8, on their device.

        For one tensor it is a view of it. Several must be on one device.
        """
        views = [self._bytes[name] for name in names]
        return torch.cat(views) if len(views) > 1 else views[0]

    def on_host(self, name: str, begin: int, end: int) -> Bytes:
        """Bytes `begin` to `end` of this rank's part of a tensor.

        They are a view of a tensor on the host, and a copy of one on a device.
        """
        if name in self._host:
            return self._host[name][begin:end]
        copied: Bytes = self._device[name][begin:end].cpu().numpy()
        return copied

    def joined(self, pieces: Iterable[Piece]) -> list[Piece | Strip]:
        """The same pieces; those that can be copied in one call have become strips.

        Args:
            pieces: in the file's order.
        """
        found: list[Piece | Strip] = []
        some: list[Piece] = []
        end = 0

        def join() -> None:
            if some:
                found.append(self._strip(some))
                some.clear()

        for piece in pieces:
            if piece.block.rows > 1 or piece.name in self._device:
                join()
                found.append(piece)
                continue
            if piece.first != end:
                join()
            some.append(piece)
            end = piece.first + piece.nbytes
        join()
        return found

    def _strip(self, pieces: Sequence[Piece]) -> Strip:
        cuts = [
            (place, slice(piece.block.local, piece.block.local + piece.nbytes))
            for place, piece in enumerate(pieces)
            if piece.nbytes < self._bytes[piece.name].numel()
        ]
        names = tuple(piece.name for piece in pieces)
        return Strip(pieces[0].first, total(pieces), names, tuple(cuts))

    def _copy(self, strip: Strip, into: Bytes) -> None:
        views = [self._bytes[name] for name in strip.names]
        for place, cut in strip.cuts:
            views[place] = views[place][cut]
        torch.cat(views, out=torch.from_numpy(into))

    def memory(self, pieces: Sequence[Piece | Strip], nbytes: int) -> Bytes | None:
        """A view of the tensor on the host that has all `nbytes` bytes of an extent, if any."""
        if len(pieces) != 1 or pieces[0].nbytes != nbytes:
            return None
        piece = pieces[0]
        if isinstance(piece, Piece):
            return None if piece.name in self._device else self._rows(piece).reshape(-1)
        if len(piece.names) > 1:
            return None
        memory = self._host[piece.names[0]]
        return memory[piece.cuts[0][1]] if piece.cuts else memory

    def gather(self, pieces: Iterable[Piece | Strip], extent: Bytes) -> None:
        """Copy this rank's pieces to their places in an extent."""
        for piece in pieces:
            if isinstance(piece, Strip):
                self._copy(piece, extent[piece.first : piece.first + piece.nbytes])
                continue
            rows = rows_in(extent, piece)
            if piece.name in self._device:  # directly, because the extent may be pinned memory
                torch.from_numpy(rows).copy_(self._on_device(piece))
            else:
                rows[:] = self._rows(piece)

    def pack(self, pieces: Iterable[Piece | Strip], packed: Bytes) -> None:
        """Copy this rank's pieces to `packed`, one behind the other."""
        position = 0
        for piece in pieces:
            into = packed[position : position + piece.nbytes]
            if isinstance(piece, Strip):
                self._copy(piece, into)
            else:
                into[:] = self._rows(piece).reshape(-1)
            position += piece.nbytes

    def scatter(self, extent: Bytes, pieces: Iterable[Piece]) -> None:
        """Copy pieces of an extent into this rank's tensors."""
        for piece in pieces:
            self._put(piece, rows_in(extent, piece))

    def unpack(self, packed: Bytes, pieces: Iterable[Piece]) -> None:
        """Copy pieces that lie in `packed`, one behind the other, into this rank's tensors."""
        position = 0
        for piece in pieces:
            rows = packed[position : position + piece.nbytes].reshape(piece.block.rows, -1)
            self._put(piece, rows)
            position += piece.nbytes

    def _rows(self, piece: Piece) -> Bytes:
        """A piece, (rows, length): a view of a tensor on the host, a copy of one on a device."""
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
    """A contiguous tensor's memory as a view, (bytes,) uint8."""
    return tensor.detach().view(-1).view(torch.uint8)
