"""Collectives over an mpi4py communicator."""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpc_train.mpi.group import Group

# MPI's own sum knows no 16-bit floats: passing their bits as integers would add the bit patterns.
SUMMABLE = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
PIECE_BYTES = 1 << 30  # MPI-3 counts are C ints, and some transports fail near 2 GiB


class MpiCollectives:
    """Implements `Collectives` on the group's communicator.

    Tensors on a device are staged through host memory.
    """

    def __init__(self, group: Group) -> None:
        if group.comm is None:
            raise ValueError("this group has no communicator: use AloneCollectives")
        self.group = group
        self.comm = group.comm

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the ranks."""
        if tensor.dtype not in SUMMABLE:
            raise TypeError(f"MPI cannot add {tensor.dtype}: convert to float32 or float64")
        host = tensor.detach().cpu().contiguous()
        for piece in _pieces(host):
            self.comm.Allreduce(MPI.IN_PLACE, [piece, SUMMABLE[tensor.dtype]], op=MPI.SUM)
        _bring_back(tensor, host)

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Replace the tensor by that of rank `root`."""
        host = tensor.detach().cpu().contiguous()
        for piece in _pieces(host.view(-1).view(torch.uint8)):
            self.comm.Bcast([piece, MPI.BYTE], root=root)
        _bring_back(tensor, host)


def _pieces(host: Tensor) -> list[Any]:
    """NumPy views that cover a contiguous host tensor, each of 1 GiB at most."""
    flat = host.view(-1).numpy()
    count = PIECE_BYTES // flat.itemsize
    return [flat[first : first + count] for first in range(0, flat.size, count)]


def _bring_back(tensor: Tensor, host: Tensor) -> None:
    if host.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(host)
