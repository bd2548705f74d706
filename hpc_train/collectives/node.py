"""Memory that the ranks of a node share, and sums in it at the speed of memory.

Each rank has a part of it, and all ranks can read and write the parts of the others. The memory is
a file without a name in /dev/shm, which each rank maps. It is no MPI window, because MPI frees a
window at a collective call, and a program may have tensors in the memory for longer, such as those
of `model.state_dict()`. Ranks signal what they have written by numbers in that memory, without a
call that waits. Memory barriers are those of an MPI-3 window (MPI.Win.Sync; Hoefler et al., "MPI +
MPI: a new hybrid approach to parallel programming with MPI plus shared memory", Computing 95,
2013).
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.errors import SetupError, size_text
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI

MEMORY_ALIGNMENT = 64  # bytes: a cache line, and torch's widest vectors
BLOCK_BYTES = 1 << 18  # of a sum at a time: stays in the core's cache until it is written out
SPARE = 64 << 20  # bytes of shared memory to leave free


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
        header = 8 * max(1, signals) * node.size  # an empty file cannot be mapped
        # Parts have pages of their own, so each can be near its rank (NUMA) or pinned for a GPU.
        begins = [0, *accumulate(_pages(n) for n in [header, *node.comm.allgather(nbytes)])]
        total = sum(node.comm.allgather(nbytes if touched is None else touched))
        with agreed(node):
            _check_room(total)  # other groups of the node may ask at the same time: hence SPARE
        self._fence = _window(node)
        try:
            memory = _mapped(begins[-1], node)
        except SetupError:
            self._free()
            raise
        rows = torch.frombuffer(memory, dtype=torch.int64, count=header // 8).view(-1, node.size)
        self._signals = [memoryview(row.numpy()) for row in rows]  # quicker to read than a tensor
        self.parts = [_part(memory, *ends) for ends in pairwise(begins[1:])]
        """The ranks' parts, as uint8 tensors of one dimension, aligned, in the order of ranks."""
        if touched is None:
            self.parts[node.rank].zero_()
        self._fence.Sync()
        node.barrier()

    def tell(self, signal: int, value: int) -> None:
        """Set a number, once the other ranks can see all that this rank has written so far."""
        self._fence.Sync()
        self._signals[signal][self.node.rank] = value

    def told(self, signal: int, value: int, ranks: range) -> bool:
        """Whether these ranks have set a number to this value or a larger one."""
        if min(self._signals[signal][ranks.start : ranks.stop].tolist()) < value:
            return False
        self._fence.Sync()
        return True

    def wait(self, signal: int, value: int, ranks: range) -> Coroutine[None]:
        """Wait until these ranks have set a number to this value or a larger one."""
        yield lambda: self.told(signal, value, ranks)

    def close(self) -> None:
        """Drop the memory; no rank signals any more. Collective.

        The operating system frees it when no rank has a tensor in it any more.
        """
        self.parts, self._signals = [], []
        self._free()

    def _free(self) -> None:
        self._fence.Unlock_all()
        self._fence.Free()


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


def _window(node: Group) -> MPI.Win:
    """Make a window whose `Sync` is a memory barrier. Collective.

    Raises:
        SetupError: this MPI cannot share memory here, because it uses another one-sided component
            or because the ranks are in different containers; raised on all ranks.
    """
    from mpi4py import MPI  # it is running, because the group has a communicator

    assert node.comm is not None
    with agreed(node):  # a library that cannot share memory says so on all ranks of the node
        try:
            window = MPI.Win.Allocate_shared(8, 1, MPI.INFO_NULL, node.comm)
            window.Lock_all(MPI.MODE_NOCHECK)  # MPI allows Sync only after a lock
        except MPI.Exception as error:
            raise SetupError(
                f"the ranks of {node.host} cannot share memory by MPI windows ({error})",
                "allow the MPI library its shared-memory windows "
                "(Open MPI: OMPI_MCA_osc without ^sm)",
            ) from None
    return window


def _mapped(nbytes: int, node: Group) -> mmap.mmap:
    """Map memory that the ranks of a node share, filled with zeros. Collective.

    Raises:
        SetupError: there is no folder for it that all ranks can write to; raised on all ranks.
    """
    assert node.comm is not None
    path = ""
    with agreed(node):
        if node.rank == 0:
            with _sharing(node):
                descriptor, path = tempfile.mkstemp(prefix="hpc_train-", dir=_folder())
                os.close(descriptor)
    path = node.comm.bcast(path)
    try:
        with agreed(node), _sharing(node):
            descriptor = os.open(path, os.O_RDWR)
            try:
                os.ftruncate(descriptor, nbytes)  # the same on each rank
                memory = mmap.mmap(descriptor, nbytes)
            finally:
                os.close(descriptor)
    finally:
        if node.rank == 0:
            Path(path).unlink()  # what is mapped stays
    return memory


@contextmanager
def _sharing(node: Group) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"the ranks of {node.host} cannot share memory in {_folder()} ({error.strerror})",
            "let all of them see the same /dev/shm and write to it (in containers --bind /dev/shm)",
        ) from None


def _part(memory: mmap.mmap, begin: int, end: int) -> Tensor:
    if begin == end:  # `frombuffer` makes no empty tensor
        return torch.empty(0, dtype=torch.uint8)
    # Not a slice of a larger tensor: views as complex numbers need a storage offset that is even.
    return torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=begin)


def own_pages(nbytes: int) -> Tensor:
    """Zeros that this rank alone sees, (bytes,) of uint8, on pages of their own.

    A GPU pins whole pages, and none twice.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _part(mmap.mmap(-1, max(1, nbytes), flags=private), 0, nbytes)


def _folder() -> str:
    """The folder in memory, or where there is none the one for temporary files."""
    usable = os.access("/dev/shm", os.W_OK | os.X_OK)
    return "/dev/shm" if usable else tempfile.gettempdir()


def _check_room(nbytes: int) -> None:
    """Check that there is room for this many bytes of shared memory.

    Raises:
        SetupError: there is not. Ranks that fill it die of a bus error.
    """
    room = os.statvfs(_folder())
    free = room.f_bavail * room.f_frsize
    if free < nbytes + SPARE:
        raise SetupError(
            f"{_folder()} of {socket.gethostname()} has {size_text(free)} free, but the ranks of "
            f"the node need {size_text(nbytes)} of shared memory",
            "enlarge it (in containers --shm-size)",
        )


def _pages(nbytes: int) -> int:
    """The size of the whole pages that this many bytes need."""
    return math.ceil(nbytes / mmap.PAGESIZE) * mmap.PAGESIZE


def aligned(nbytes: int) -> int:
    """The smallest multiple of `MEMORY_ALIGNMENT` that is not below this number of bytes."""
    return math.ceil(nbytes / MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
