"""The operations that the rest of the package asks of a group of ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hpc_train.mpi.group import Group


class Collectives(Protocol):
    """Operations over the ranks of one group; every rank of it must call each of them.

    Tensors are contiguous; all ranks pass the same shapes and dtypes in the same order.
    """

    group: Group

    def sum_(self, tensor: Tensor) -> None:
        """Replace a float32, float64, int32 or int64 tensor by its sum over the ranks."""

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Replace the tensor by that of rank `root` of the group; any dtype."""


def connect(group: Group) -> Collectives:
    """The fitting implementation: nothing to do in a process alone, else MPI."""
    if group.comm is None:
        from hpc_train.collectives.alone import AloneCollectives

        return AloneCollectives(group)
    from hpc_train.collectives.mpi import MpiCollectives

    return MpiCollectives(group)
