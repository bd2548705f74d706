"""Memory that the ranks of a node share, and sums in it at the speed of memory.

The memory is an MPI-3 window (MPI.Win.Allocate_shared; Hoefler et al., "MPI + MPI: a new hybrid
approach to parallel programming with MPI plus shared memory", Computing 95, 2013). Each rank has a
part of it, and all ranks can read and write the parts of the others. Ranks signal what they have
written by numbers in that memory, without a call that waits.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.errors import SetupError
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI

MEMORY_ALIGNMENT = 64  # bytes: a cache line, and torch's widest vectors
BLOCK_BYTES = 1 << 18  # of a sum at a time: stays in the core's cache until it is written out
SPARE = 64 << 20  # bytes of /dev/shm to leave free


class NodeMemory:
    """One part of shared memory for each rank of a node. Collective to make.

    Args:
        node: the ranks; they must be able to share memory.
        nbytes: size of this rank's part.
        signals: how many numbers each rank can set.
        touched: how many bytes of its part will be used at once. None: all of it, and each rank is
            the first to touch its part now, so that its memory is near (NUMA).

    Raises:
        SetupError: there is not enough shared memory, or this MPI cannot share memory here; raised
            on all ranks.
    """

    def __init__(
        self, node: Group, nbytes: int, signals: int, *, touched: int | None = None
    ) -> None:
        assert node.comm is not None
        self.node = node
        # Each signal has a row with one number for each rank, so a wait reads contiguous memory.
        header = aligned(8 * signals * node.size) if node.rank == 0 else 0
        size = header + aligned(nbytes) + MEMORY_ALIGNMENT  # MPI may give memory that is unaligned
        used = size if touched is None else size - nbytes + touched
        total = sum(node.comm.allgather(used))
        with agreed(node):
            _check_room(total)  # other groups of the node may ask at the same time: hence SPARE
        with agreed(node):  # a library that cannot share memory says so on all ranks of the node
            self._window = _window(size, node)
        parts = [self._part(rank) for rank in range(node.size)]
        rows = parts[0][: 8 * signals * node.size].view(torch.int64).view(signals, node.size)
        rows[:, node.rank] = 0
        self._signals = [memoryview(row.numpy()) for row in rows]  # quicker to read than a tensor
        self.parts = [parts[0][aligned(8 * signals * node.size) :], *parts[1:]]
        """The ranks' parts, as uint8 tensors of one dimension, aligned, in the order of ranks."""
        if touched is None:
            self.parts[node.rank].zero_()
        self._window.Sync()
        node.barrier()

    def _part(self, rank: int) -> Tensor:
        buffer, _ = self._window.Shared_query(rank)
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        shift, count = -whole.data_ptr() % MEMORY_ALIGNMENT, len(whole) - MEMORY_ALIGNMENT
        if not count:  # `frombuffer` makes no empty tensor
            return torch.empty(0, dtype=torch.uint8)
        # Not a slice of `whole`: views as complex numbers need a storage offset that is even.
        return torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=shift)

    def tell(self, signal: int, value: int) -> None:
        """Set a number, once the other ranks can see all that this rank has written so far."""
        self._window.Sync()
        self._signals[signal][self.node.rank] = value

    def told(self, signal: int, value: int, ranks: range) -> bool:
        """Whether these ranks have set a number to this value or a larger one."""
        if min(self._signals[signal][ranks.start : ranks.stop].tolist()) < value:
            return False
        self._window.Sync()
        return True

    def wait(self, signal: int, value: int, ranks: range) -> Coroutine[None]:
        """Wait until these ranks have set a number to this value or a larger one."""
        yield lambda: self.told(signal, value, ranks)

    def close(self) -> None:
        """Free the memory; its tensors must not be used any more. Collective."""
        self._window.Unlock_all()
        self._window.Free()


def sum_into(parts: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Sum tensors and write the result to each of the targets, which may be among them.

    Args:
        parts: two or more tensors of one dimension, of the same length and dtype. They are added in
            this order, so the result has the same bits on every rank.
        targets: tensors like the parts.
    """
    # Block by block, one for each of torch's threads: a sum is still in the core's cache when it is
    # written to the targets.
    count = max(1, BLOCK_BYTES * torch.get_num_threads() // parts[0].element_size())
    more = len(parts) > 2
    scratch = torch.empty(min(count, len(parts[0])) if more else 0, dtype=parts[0].dtype)
    for begin in range(0, len(parts[0]), count):
        total, *rest, last = (part[begin : begin + count] for part in parts)
        for block in rest:
            total = torch.add(total, block, out=scratch[: len(block)])
        first, *others = (target[begin : begin + count] for target in targets)
        torch.add(total, last, out=first)
        for other in others:
            other.copy_(first)


def _window(nbytes: int, node: Group) -> MPI.Win:
    """Allocate shared memory with `nbytes` bytes for this rank of the node. Collective.

    Raises:
        SetupError: this MPI cannot share memory here, because it uses another one-sided component
            or because the ranks are in different containers.
    """
    from mpi4py import MPI  # it is running, because the group has a communicator

    assert node.comm is not None
    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
    try:
        window = MPI.Win.Allocate_shared(nbytes, 1, info, node.comm)
        window.Lock_all(MPI.MODE_NOCHECK)  # MPI allows Sync, a memory barrier, only after a lock
    except MPI.Exception as error:
        raise SetupError(
            f"the ranks of {node.host} cannot share memory by MPI windows ({error})",
            "allow the MPI library its shared-memory windows (Open MPI: OMPI_MCA_osc without ^sm)",
        ) from None
    finally:
        info.Free()
    return window


def _check_room(nbytes: int) -> None:
    """Check that /dev/shm has room for this many bytes.

    Raises:
        SetupError: it has not. Ranks that fill it die of a bus error.
    """
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return  # there is none: MPI takes shared memory from elsewhere
    free = room.f_bavail * room.f_frsize
    if free < nbytes + SPARE:
        raise SetupError(
            f"/dev/shm of {socket.gethostname()} has {free >> 20} MiB free, but the ranks of the "
            f"node need {nbytes >> 20} MiB of shared memory",
            "enlarge it (in containers --shm-size)",
        )


def aligned(nbytes: int) -> int:
    """The smallest multiple of `MEMORY_ALIGNMENT` that is not below this number of bytes."""
    return math.ceil(nbytes / MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
