"""The operations that the rest of the package asks of a group of ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

WIDENED = (torch.bfloat16, torch.float16)
"""Types whose sums are computed in float32."""


class Pending(Protocol):
    """An operation that goes on while the rank computes."""

    def wait(self) -> Tensor:
        """Wait for the end; returns the result. All ranks wait in the same order."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""


class Collectives(Protocol):
    """Operations over the ranks of one group; every rank of it must call each of them.

    All ranks pass the same shapes and dtypes in the same order. Sums are of float32, float64, int32
    or int64, or of bfloat16 or float16, which are added in float32 and then rounded.
    """

    group: Group

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""

    def max_(self, tensor: Tensor) -> None:
        """Replace a tensor by the largest of the ranks' elements."""

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Replace the tensor by that of rank `root` of the group; any dtype."""

    def start_sum_(self, tensor: Tensor) -> Pending:
        """Begin `sum_`; the tensor is contiguous and must be left alone until the end."""

    def start_gather(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to put the ranks' tensors together along a dimension, in the order of ranks."""

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to sum over the ranks and keep this rank's part along a dimension (divisible)."""

    @property
    def overlaps(self) -> bool:
        """Whether what is begun makes progress while the rank computes, the same on all ranks."""

    def close(self) -> None:
        """Release threads and communicators; the group stays. Collective."""


class Done:
    """Implements `Pending` for a result that is already there."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        """The result."""
        return self.result

    def done(self) -> bool:
        """It is."""
        return True


def connect(
    group: Group, device: torch.device | None = None, *, overlap: bool = False
) -> Collectives:
    """The fitting implementation: nothing to do in a process alone, else MPI or Horovod.

    Collective over the group. It is to be closed, collectively as well.

    Args:
        group: the ranks.
        device: where the tensors will lie. Of a GPU's, MPI takes those that it can read; if it can
            not and Horovod runs with NCCL, Horovod does; else they go through host memory.
        overlap: whether a thread carries out what is begun, where the implementation has no way of
            its own: for ranks with a core to spare. It does if all ranks ask for it.
    """
    if group.comm is None:
        from hpc_train.collectives.alone import AloneCollectives

        return AloneCollectives(group)
    from hpc_train.collectives.mpi import MpiCollectives

    hvd = _fitting_horovod(device)
    # What a rank finds depends on its own host, so the ranks agree on it.
    if group.smallest(int(hvd is not None)):
        from hpc_train.collectives.horovod import HorovodCollectives

        return HorovodCollectives(group, hvd)
    return MpiCollectives(group, overlap=overlap)


def _fitting_horovod(device: torch.device | None) -> Any:
    """The module horovod.torch, where it runs and serves a device better than MPI does."""
    from hpc_train.collectives.mpi import reads_gpu_memory

    if device is None or device.type != "cuda" or reads_gpu_memory():
        return None
    hvd = runtime.running_horovod()
    return hvd if hvd is not None and hvd.nccl_built() else None
