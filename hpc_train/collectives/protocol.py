"""The interface of collective operations on tensors, and the choice of an implementation."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hpc_train.errors import UserError
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

WIDENED = (torch.bfloat16, torch.float16)
"""Types whose sums are computed in float32."""


class Pending(Protocol):
    """An operation that goes on while the rank computes."""

    def wait(self) -> Tensor:
        """Wait for the end; returns the result. All ranks must wait in the same order."""

    def done(self) -> bool:
        """Whether the operation is finished, so that `wait` would return at once."""


class Collectives(Protocol):
    """Operations over the ranks of one group. Each method is collective.

    All ranks must call them in the same order, with the same shapes and dtypes. Sums and maxima
    take float32, float64, int32 and int64; also bfloat16 and float16, which are added in float32
    and then rounded.
    """

    group: Group

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""

    def max_(self, tensor: Tensor) -> None:
        """Replace a tensor by its elementwise maximum over the ranks; no element is NaN."""

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Replace the tensor by that of rank `root` of the group; any dtype."""

    def start_sum_(self, tensor: Tensor) -> Pending:
        """Begin `sum_` of a contiguous tensor, which must not be used until the end."""

    def start_gather(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to join the ranks' tensors along a dimension, in the order of ranks.

        Raises:
            UserError: the tensor has no dimensions.
        """

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to sum over the ranks and to keep this rank's equal part along a dimension.

        The ranks must divide the dimension.

        Raises:
            UserError: the tensor has no dimensions.
        """

    @property
    def overlaps(self) -> bool:
        """Whether `start_...` makes progress while the rank computes, the same on all ranks."""

    def close(self) -> None:
        """Release threads and communicators, but not the group. Collective."""


class Done:
    """Implements `Pending` for a result that is already there."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        """The result, without waiting."""
        return self.result

    def done(self) -> bool:
        """True: the result is there."""
        return True


def check_has_dimension(tensor: Tensor) -> None:
    """Check that a tensor has a dimension along which ranks' tensors can be joined or cut.

    Raises:
        UserError: it is a single number.
    """
    if not tensor.dim():
        raise UserError(
            "ranks can neither join nor cut a tensor without dimensions",
            "give it a first dimension, as x.unsqueeze(0) does",
        )


def connect(
    group: Group,
    device: torch.device | None = None,
    *,
    overlap: bool = False,
    purpose: str = "other",
) -> Collectives:
    """The collectives that fit a group: trivial for one rank, else over MPI or Horovod. Collective.

    The caller must close the result, which is collective, too.

    Args:
        group: the ranks.
        device: where the tensors will be; None for host memory. Tensors on a GPU are passed to MPI
            if it can read GPU memory. Otherwise Horovod takes them if it is running with NCCL, and
            MPI through host memory if not.
        overlap: whether a thread of MPI's collectives carries out `start_...`, for ranks with a
            core to spare. It does so if all ranks ask for it.
        purpose: what the operations are for, as the count of what ranks communicate names it.
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
    return MpiCollectives(group, overlap=overlap, purpose=purpose)


def reaches(device: torch.device) -> bool:
    """Whether `connect` makes collectives that read and write this device's memory themselves."""
    from hpc_train.collectives.mpi import reads_gpu_memory

    return device.type == "cuda" and (reads_gpu_memory() or _fitting_horovod(device) is not None)


def _fitting_horovod(device: torch.device | None) -> Any:
    """The module horovod.torch if it is running and serves a device better than MPI, else None."""
    from hpc_train.collectives.mpi import reads_gpu_memory

    if device is None or device.type != "cuda" or reads_gpu_memory():
        return None
    hvd = runtime.running_horovod()
    return hvd if hvd is not None and hvd.nccl_built() else None
