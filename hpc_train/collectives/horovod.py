"""Collectives over a Horovod process set: NCCL for tensors on GPUs, where Horovod was built so."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hpc_train.collectives.protocol import Pending
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group


class HorovodCollectives:
    """Implements `Collectives` on the process set of the group's ranks.

    Horovod tells operations apart by names: every rank counts its own, in the same order. It orders
    ranks as the job does, so what is gathered or scattered needs a group that ascends.

    Args:
        group: the ranks; their process set must be registered (`runtime.start_horovod`).
        hvd: the module horovod.torch, initialised.
    """

    def __init__(self, group: Group, hvd: Any) -> None:
        if group.comm is None:
            raise ValueError("this group has no communicator: use AloneCollectives")
        self.group = group
        self.hvd = hvd
        self.ranks = group.comm.allgather(hvd.rank())
        self._ascends = self.ranks == sorted(self.ranks)
        self.process_set = runtime.process_set(hvd, self.ranks)
        self._count = 0

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the ranks."""
        self.start_sum_(tensor).wait()

    def max_(self, tensor: Tensor) -> None:
        """Replace the tensor by the largest of the ranks' elements."""
        self._reduce(tensor, self.hvd.Max).wait()

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Replace the tensor by that of rank `root`."""
        handle = self.hvd.broadcast_async_(
            tensor, self.ranks[root], name=self._name(), process_set=self.process_set
        )
        Begun(self, handle).wait()

    def start_sum_(self, tensor: Tensor) -> Pending:
        """Begin `sum_`."""
        return self._reduce(tensor, self.hvd.Sum)

    def start_gather(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to put the ranks' tensors together along a dimension."""
        first = self._first(tensor, dim)
        handle = self.hvd.allgather_async(first, name=self._name(), process_set=self.process_set)
        return Begun(self, handle, dim)

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to sum over the ranks and keep this rank's part along a dimension."""
        first = self._first(tensor, dim)
        handle = self.hvd.reducescatter_async(
            first, op=self.hvd.Sum, name=self._name(), process_set=self.process_set
        )
        return Begun(self, handle, dim)

    def _first(self, tensor: Tensor, dim: int) -> Tensor:
        """The dimension that Horovod cuts is the first."""
        if not self._ascends:
            raise ValueError(f"Horovod would reorder ranks {self.ranks}: gather over MPI")
        return tensor.detach().movedim(dim, 0).contiguous()

    def _reduce(self, tensor: Tensor, operation: Any) -> Pending:
        handle = self.hvd.allreduce_async_(
            tensor.detach(), op=operation, name=self._name(), process_set=self.process_set
        )
        return Begun(self, handle)

    def _name(self) -> str:
        """Equal on the ranks of the group, unlike that of any other group at the same moment."""
        self._count = (self._count + 1) % (1 << 20)
        return f"hpc_train.{self.process_set.process_set_id}.{self._count}"


class Begun:
    """Implements `Pending` for a Horovod handle; the result's first dimension goes to `dim`."""

    def __init__(self, owner: HorovodCollectives, handle: Any, dim: int = 0) -> None:
        self.owner = owner
        self.handle = handle
        self.dim = dim

    def wait(self) -> Tensor:
        """Wait for Horovod's thread."""
        with self.owner.group.waiting(f"Horovod, over {self.owner.group.size} ranks"):
            result: Tensor = self.owner.hvd.synchronize(self.handle)
        return result.movedim(0, self.dim).contiguous() if self.dim else result
