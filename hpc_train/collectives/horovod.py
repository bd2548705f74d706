"""Collectives over a Horovod process set: NCCL for tensors on GPUs, where Horovod was built so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from hpc_train.collectives.protocol import WIDENED, Pending
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group


class HorovodCollectives:
    """Implements `Collectives` on the process set of the group's ranks.

    Horovod tells operations apart by names: every rank counts its own, in the same order. It orders
    ranks as the job does, so what is gathered or scattered needs a group that ascends. To make one
    is collective.

    Args:
        group: the ranks; their process set must be registered (`runtime.start_horovod`).
        hvd: the module horovod.torch, initialised.
    """

    made: ClassVar[int] = 0
    """The last one's number: several may share a process set, but no operation's name."""

    def __init__(self, group: Group, hvd: Any) -> None:
        if group.comm is None:
            raise ValueError("this group has no communicator: use AloneCollectives")
        self.group = group
        self.hvd = hvd
        with group.waiting("the ranks of a Horovod process set"):
            told = group.comm.allgather((hvd.rank(), HorovodCollectives.made))
        self.ranks = [rank for rank, _ in told]
        self._ascends = self.ranks == sorted(self.ranks)
        self.process_set = runtime.process_set(hvd, self.ranks)
        HorovodCollectives.made = 1 + max(made for _, made in told)
        self._label = f"hpc_train.{self.process_set.process_set_id}.{HorovodCollectives.made}"
        self._count = 0

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the ranks."""
        self.start_sum_(tensor).wait()

    def max_(self, tensor: Tensor) -> None:
        """Replace the tensor by the largest of the ranks' elements."""
        self._reduce(tensor, self.hvd.Max).wait()

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Replace the tensor by that of rank `root`."""
        near = tensor.detach().contiguous()  # Horovod takes nothing else
        handle = self.hvd.broadcast_async_(
            _bits(near), self.ranks[root], name=self._name(), process_set=self.process_set
        )
        Begun(self, handle, lambda _: _replaced(tensor, near)).wait()

    def start_sum_(self, tensor: Tensor) -> Pending:
        """Begin `sum_`."""
        return self._reduce(tensor, self.hvd.Sum)

    def start_gather(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to put the ranks' tensors together along a dimension."""
        first = self._first(tensor, dim)
        shape = (self.group.size * first.shape[0], *first.shape[1:])
        handle = self.hvd.allgather_async(
            _bits(first), name=self._name(), process_set=self.process_set
        )
        return Begun(self, handle, lambda bits: _moved(bits.view(tensor.dtype).view(shape), dim))

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to sum over the ranks and keep this rank's part along a dimension."""
        first = _wide(self._first(tensor, dim))
        handle = self.hvd.reducescatter_async(
            first, op=self.hvd.Sum, name=self._name(), process_set=self.process_set
        )
        return Begun(self, handle, lambda part: _moved(part, dim).to(tensor.dtype))

    @property
    def overlaps(self) -> bool:
        """Horovod's thread works beside this one."""
        return True

    def close(self) -> None:
        """Process sets and threads are Horovod's."""

    def _first(self, tensor: Tensor, dim: int) -> Tensor:
        """The dimension that Horovod cuts is the first."""
        if not self._ascends:
            raise ValueError(f"Horovod would reorder ranks {self.ranks}: gather over MPI")
        return tensor.detach().movedim(dim, 0).contiguous()

    def _reduce(self, tensor: Tensor, operation: Any) -> Pending:
        near = _wide(tensor.detach().contiguous())
        handle = self.hvd.allreduce_async_(
            near, op=operation, name=self._name(), process_set=self.process_set
        )
        return Begun(self, handle, lambda _: _replaced(tensor, near))

    def _name(self) -> str:
        """Equal on the ranks of the group, unlike that of any other group at the same moment."""
        self._count = (self._count + 1) % (1 << 20)
        return f"{self._label}.{self._count}"


class Begun:
    """Implements `Pending` for a Horovod handle."""

    def __init__(
        self, owner: HorovodCollectives, handle: Any, finish: Callable[[Tensor], Tensor]
    ) -> None:
        self.owner, self.handle, self.finish = owner, handle, finish

    def wait(self) -> Tensor:
        """Wait for Horovod's thread and bring the result into its form."""
        with self.owner.group.waiting(f"Horovod, over {self.owner.group.size} ranks"):
            result: Tensor = self.owner.hvd.synchronize(self.handle)
        return self.finish(result)

    def done(self) -> bool:
        """Whether Horovod's thread is through."""
        return bool(self.owner.hvd.poll(self.handle))


def _bits(near: Tensor) -> Tensor:
    """A contiguous tensor's bytes: Horovod moves not all types."""
    return near.view(-1).view(torch.uint8)


def _wide(near: Tensor) -> Tensor:
    """What Horovod is given to add."""
    return near.float() if near.dtype in WIDENED else near


def _moved(result: Tensor, dim: int) -> Tensor:
    """A result with its first dimension put where it belongs."""
    return result.movedim(0, dim).contiguous()


def _replaced(tensor: Tensor, near: Tensor) -> Tensor:
    if near.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(near)
    return tensor
