"""Memory that the ranks of a node share, and sums in it at the speed of memory.

MPI-3 windows (MPI.Win.Allocate_shared; Hoefler et al., "MPI + MPI: a new hybrid approach to
parallel programming with MPI plus shared memory", Computing 95, 2013): each rank has a part that it
writes, and all ranks read and write the parts of the others. Ranks tell each other of what is
written by numbers in that memory, with no call that waits.
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
BLOCK_BYTES = 1 << 18  # of a sum at a time: it stays in the core's cache until it is written out
SPARE = 64 << 20  # left free where shared memory is a file system of limited size


class NodeMemory:
    """One part of shared memory for each rank of a node. Collective to make.

    Args:
        node: the ranks; they must be able to share memory.
        nbytes: size of this rank's part.
        signals: how many numbers each rank can set.
        touch: let each rank be the first to touch its part, whose memory is then near to it (NUMA).

    Raises:
        SetupError: there is not enough shared memory; raised on all ranks.
    """

    def __init__(self, node: Group, nbytes: int, signals: int, *, touch: bool = True) -> None:
        assert node.comm is not None
        self.node = node
        # A row of one number for each rank, for each signal: who waits reads one run of memory.
        header = _aligned(8 * signals * node.size) if node.rank == 0 else 0
        size = header + _aligned(nbytes) + MEMORY_ALIGNMENT  # whose beginning may be unaligned
        total = sum(node.comm.allgather(size))
        with agreed(node):
            _check_room(total)  # other groups of the node may ask at the same time: hence SPARE
        with agreed(node):  # a library that cannot share memory says so on all ranks of the node
            self._window = _window(size, node)
        parts = [self._part(rank) for rank in range(node.size)]
        rows = parts[0][: 8 * signals * node.size].view(torch.int64).view(signals, node.size)
        rows[:, node.rank] = 0
        self._signals = [memoryview(row.numpy()) for row in rows]  # the quickest to read
        self.parts = [parts[0][_aligned(8 * signals * node.size) :], *parts[1:]]
        """The ranks' parts, as uint8 tensors of one dimension, aligned, in the order of ranks."""
        if touch:
            self.parts[node.rank].zero_()
        self._window.Sync()
        node.barrier()

    def _part(self, rank: int) -> Tensor:
        buffer, _ = self._window.Shared_query(rank)
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        shift, count = -whole.data_ptr() % MEMORY_ALIGNMENT, len(whole) - MEMORY_ALIGNMENT
        # Begins there, which a slice does not: complex views need an even storage offset.
        return torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=shift)

    def tell(self, signal: int, value: int) -> None:
        """Set a number, after all that this rank has written so far can be seen by the others."""
        self._window.Sync()
        self._signals[signal][self.node.rank] = value

    def told(self, signal: int, value: int, ranks: range) -> bool:
        """Whether these ranks have set a number to this value or a larger one."""
        if min(self._signals[signal][ranks.start : ranks.stop].tolist()) < value:
            return False
        self._window.Sync()
        return True

    def wait(self, signal: int, value: int, ranks: range) -> Coroutine[None]:
        """Wait until these ranks have."""
        yield lambda: self.told(signal, value, ranks)

    def close(self) -> None:
        """Give the memory back; nobody may use its tensors any more. Collective."""
        self._window.Unlock_all()
        self._window.Free()


def sum_into(parts: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Sum tensors and write the result to each of the targets, which may be among them.

    Block by block, so that a sum is still in the core's cache when it is written out again; each of
    torch's threads has a block at a time.

    Args:
        parts: two or more, one dimension, of one length and dtype. They are added in their order:
            who adds them makes no difference to the bits.
        targets: as the parts.
    """
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
    """Shared memory with `nbytes` bytes for each rank of a node. Collective.

    Raises:
        SetupError: this MPI cannot share memory here: its one-sided component is another, or
            containers keep the ranks apart.
    """
    from mpi4py import MPI  # a group with a communicator has MPI

    assert node.comm is not None
    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
    try:
        window = MPI.Win.Allocate_shared(nbytes, 1, info, node.comm)
        window.Lock_all(MPI.MODE_NOCHECK)  # what Sync, a memory barrier, needs
    except MPI.Exception as error:
        raise SetupError(
            f"the ranks of {node.host} cannot share memory by MPI windows ({error})",
            "allow the MPI library its shared-memory windows (Open MPI: OMPI_MCA_osc without ^sm)",
        ) from None
    finally:
        info.Free()
    return window


def _check_room(nbytes: int) -> None:
    """Where shared memory is a small file system, filling it kills ranks with a bus error."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return  # this MPI takes it from elsewhere
    free = room.f_bavail * room.f_frsize
    if free < nbytes + SPARE:
        raise SetupError(
            f"/dev/shm of {socket.gethostname()} has {free >> 20} MiB free, the ranks of the node "
            f"would share {nbytes >> 20} MiB",
            "enlarge it (in containers --shm-size)",
        )


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
