"""Collectives over an mpi4py communicator."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpc_train.collectives.overwrite import bits, bring_back, overwrite
from hpc_train.collectives.protocol import WIDENED, Done, Pending, check_has_dimension
from hpc_train.collectives.streams import stream_now
from hpc_train.mpi.group import Group
from hpc_train.mpi.traffic import Operation
from hpc_train.mpi.watch import Watch

# MPI's own sum has no 16-bit floats, so they are added as float32. (Passed as integers, their bit
# patterns would be added.)
MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
LARGEST_MESSAGE = 1 << 30  # MPI-3 counts are C ints, and some transports fail near 2 GiB


@functools.cache
def reads_gpu_memory() -> bool:
    """Whether this MPI library takes pointers to GPU memory; False if there is no way to ask.

    Libraries have functions that tell it: for AMD's GPUs one of Open MPI, and one of MPICH. Cray
    MPICH does if the variable MPICH_GPU_SUPPORT_ENABLED is 1.
    """
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return True
    library = ctypes.CDLL(MPI.__file__)
    queries = (getattr(library, f"MPIX_Query_{kind}_support", None) for kind in _gpu_kinds())
    return any(query and query() for query in queries)


def _gpu_kinds() -> tuple[str, ...]:
    """What MPI libraries call the GPUs that torch computes on."""
    return ("rocm", "hip") if torch.version.hip else ("cuda",)


def through_host(device: torch.device) -> bool:
    """Whether tensors of this device go through host memory, because MPI cannot read them there.

    No MPI can be asked whether it reads Intel's GPUs, so theirs always do.
    """
    return device.type != "cpu" and not (device.type == "cuda" and reads_gpu_memory())


class InThread:
    """Implements `Pending` for an operation that another thread carries out."""

    def __init__(self, group: Group, future: Future[Tensor]) -> None:
        self.group = group
        self.future = future

    def wait(self) -> Tensor:
        """Wait for the thread; returns the result."""
        with self.group.waiting(f"a collective over {self.group.size} ranks"):
            result = self.future.result()
        if (stream := stream_now(result)) is not None:
            # The thread's stream made it. Its memory must not be used again before this stream
            # has done its work with it.
            result.record_stream(stream)
        return result

    def done(self) -> bool:
        """Whether the thread has finished the operation."""
        return self.future.done()


class MpiCollectives:
    """Implements `Collectives` on the group's communicator.

    Tensors on a GPU are passed to MPI directly if it can read them, else copied through host
    memory.

    MPI makes no progress while a rank computes, and Open MPI's nonblocking sums take about 1.5
    times as long as its blocking ones (benchmarks/RESULTS.md). So the methods `start_...` carry out
    a blocking operation, either at once or in a thread, which needs a core of its own.

    Collective to make.

    Args:
        group: the ranks.
        overlap: whether to carry out `start_...` in a thread; it is used if all ranks ask for it.
        purpose: what the operations are for, as `Traffic` names it.
    """

    def __init__(self, group: Group, *, overlap: bool = False, purpose: str = "other") -> None:
        if group.comm is None:
            raise ValueError("this group has no communicator: use AloneCollectives")
        self.group = group
        self.comm = group.comm
        size, link = group.size, group.link()
        self._sum = f"a sum over {size} ranks"
        self._broadcast, self._gather = (
            f"a broadcast over {size} ranks",
            f"a gather over {size} ranks",
        )
        # Made once, as small messages take less time than what is looked up for each.
        self._counts = {
            kind: group.waiting.traffic.of(f"{purpose} {kind}", link)
            for kind in ("sums", "broadcasts", "gathers")
        }
        self._thread: ThreadPoolExecutor | None = None
        # A rank may have fewer cores than the others, so they agree on the thread.
        if group.smallest(int(overlap)):
            # The thread has a communicator of its own, so that MPI does not mix up its calls and
            # those of this thread.
            self._begun = MpiCollectives(_of_thread(group), purpose=purpose)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="collectives")

    @property
    def overlaps(self) -> bool:
        """Whether a thread carries out `start_...`, the same on all ranks."""
        return self._thread is not None

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the ranks."""
        self._reduce(tensor, MPI.SUM, self._sum)

    def max_(self, tensor: Tensor) -> None:
        """Replace the tensor by its elementwise maximum over the ranks."""
        self._reduce(tensor, MPI.MAX, f"a maximum over {self.group.size} ranks")

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Replace the tensor by that of rank `root`."""
        near = reachable(tensor)
        with self.group.waiting(self._broadcast), self._counted("broadcasts", near):
            for piece in pieces(near):
                self.comm.Bcast([piece, MPI.BYTE], root=root)
        bring_back(tensor, near)

    def start_sum_(self, tensor: Tensor) -> Pending:
        """Begin `sum_` of a contiguous tensor."""
        return self._start(MpiCollectives._summed, tensor)

    def start_gather(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to put the ranks' tensors together along a dimension."""
        check_has_dimension(tensor)
        return self._start(MpiCollectives._gathered, tensor, dim)

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Pending:
        """Begin to sum over the ranks and keep this rank's part along a dimension."""
        check_has_dimension(tensor)
        if tensor.dtype not in WIDENED:
            _type(tensor)  # refuse it here and not in the thread
        return self._start(MpiCollectives._scattered, tensor, dim)

    def close(self) -> None:
        """End the thread, if there is one. Collective."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
            self._begun.group.close()

    def _start(self, operation: Callable[..., Tensor], tensor: Tensor, *arguments: Any) -> Pending:
        if self._thread is None:
            return Done(operation(self, tensor, *arguments))
        wait_for_caller = work_of(tensor)

        def carried_out() -> Tensor:
            # The thread has other streams of the GPU than the caller, and none waits for another.
            wait_for_caller()
            result = operation(self._begun, tensor, *arguments)
            work_of(tensor)()
            return result

        return InThread(self.group, self._thread.submit(carried_out))

    def _summed(self, tensor: Tensor) -> Tensor:
        self.sum_(tensor)
        return tensor

    def _gathered(self, tensor: Tensor, dim: int) -> Tensor:
        near, size = reachable(tensor), self.group.size
        pinned = tensor.is_cuda and near.is_cpu
        whole = torch.empty(
            (size, *near.shape), dtype=near.dtype, device=near.device, pin_memory=pinned
        )
        with self.group.waiting(self._gather), self._counted("gathers", near):
            if size * near.nbytes <= LARGEST_MESSAGE:
                self.comm.Allgather([_buffer(near), MPI.BYTE], [_buffer(whole), MPI.BYTE])
            else:
                self._gather_in_parts(bits(near), bits(whole).view(size, near.nbytes))
        return _joined(whole, dim).to(tensor.device)

    def _gather_in_parts(self, mine: Tensor, every: Tensor) -> None:
        """Gather `mine`, (bytes,), as the rows of `every`, in messages of LARGEST_MESSAGE."""
        for columns in _columns(len(mine), len(every)):
            part = every[:, columns]
            there = part.new_empty(part.shape)
            self.comm.Allgather([_buffer(mine[columns]), MPI.BYTE], [_buffer(there), MPI.BYTE])
            part.copy_(there)
            work_of(part)()  # the next message may get the same memory

    def _scattered(self, tensor: Tensor, dim: int) -> Tensor:
        if tensor.dtype in WIDENED:
            return self._scattered(tensor.float(), dim).to(tensor.dtype)
        size = self.group.size
        near = reachable(_split(tensor, dim, size))
        mine = near.new_empty(near.shape[1:])
        datatype = _type(tensor)
        with self.group.waiting(self._sum), self._counted("sums", near):
            if near.nbytes <= LARGEST_MESSAGE:
                self.comm.Reduce_scatter_block(
                    [_buffer(near), datatype], [_buffer(mine), datatype], op=MPI.SUM
                )
            else:
                self._scatter_in_parts(near.view(size, mine.numel()), mine.view(-1))
        return mine.to(tensor.device)

    def _scatter_in_parts(self, every: Tensor, mine: Tensor) -> None:
        """Sum `every`, (ranks, count), whose row R goes to `mine` of rank R, in such messages."""
        datatype = _type(mine)
        for columns in _columns(len(mine), len(every) * mine.element_size()):
            part = reachable(every[:, columns])
            self.comm.Reduce_scatter_block(
                [_buffer(part), datatype], [_buffer(mine[columns]), datatype], op=MPI.SUM
            )

    def _counted(self, kind: str, tensor: Tensor) -> Operation:
        """Count a tensor, and the time of the block."""
        operation = self._counts[kind]
        operation.nbytes += tensor.nbytes
        return operation

    def _reduce(self, tensor: Tensor, operation: MPI.Op, what: str) -> None:
        if tensor.dtype in WIDENED:
            wide = tensor.detach().float()
            self._reduce(wide, operation, what)
            overwrite(tensor, wide)
            return
        datatype = _type(tensor)
        plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
        if plain and tensor.nbytes <= LARGEST_MESSAGE:
            # The common case, without the copies below.
            with self.group.waiting(what), self._counted("sums", tensor):
                self.comm.Allreduce(MPI.IN_PLACE, [_buffer(tensor), datatype], op=operation)
            return
        near = reachable(tensor)
        with self.group.waiting(what), self._counted("sums", near):
            for piece in pieces(near):
                self.comm.Allreduce(MPI.IN_PLACE, [piece, datatype], op=operation)
        bring_back(tensor, near)


def _of_thread(group: Group) -> Group:
    """A group of the same ranks for a thread, whose waits are not the main thread's. Collective."""
    other = replace(group.duplicate(), waiting=Watch())
    group.waiting.traffic.parts.append(other.waiting.traffic)
    return other


def _type(tensor: Tensor) -> MPI.Datatype:
    if tensor.dtype not in MPI_TYPES:
        raise TypeError(f"MPI cannot add {tensor.dtype}: convert to float32 or float64")
    return MPI_TYPES[tensor.dtype]


def work_of(tensor: Tensor) -> Callable[[], None]:
    """A function that waits until the tensor's GPU has done what this thread has told it by now."""
    if (stream := stream_now(tensor)) is None:
        return _nothing
    waits: Callable[[], None] = stream.record_event().synchronize
    return waits


def _nothing() -> None:
    pass


def reachable(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and in memory that MPI can read.

    A GPU's tensor is copied to host memory, pinned if it can be, unless MPI reads the GPU's.
    """
    # A view may stand for the conjugate or the negative of the numbers in its memory.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_cpu:
        return tensor.contiguous()
    if not through_host(tensor.device):
        near = tensor.contiguous()
        work_of(near)()  # MPI knows nothing of streams
        return near
    near = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    near.copy_(tensor, non_blocking=True)
    work_of(tensor)()
    return near


def _buffer(tensor: Tensor) -> Any:
    """A contiguous tensor as a buffer for mpi4py, which lives as long as the tensor."""
    # An address is quicker to pass than a NumPy view, or the DLPack capsule of a tensor.
    return tensor if tensor.is_cuda else MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def pieces(near: Tensor) -> list[Any]:
    """A contiguous tensor as buffers for mpi4py, of 1 GiB at most, which live as long as it."""
    if near.nbytes <= LARGEST_MESSAGE:
        return [_buffer(near)]
    flat = near.view(-1)
    return [_buffer(flat[some]) for some in _columns(flat.numel(), flat.element_size())]


def _columns(count: int, nbytes: int) -> list[slice]:
    """Divide columns into runs of 1 GiB at most.

    Args:
        count: number of columns.
        nbytes: size of a column.
    """
    most = max(1, LARGEST_MESSAGE // nbytes)
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]


def _joined(pieces: Tensor, dim: int) -> Tensor:
    """Join P pieces, (P, ...), along dimension `dim` of a piece; without a copy if possible."""
    shape = list(pieces.shape[1:])
    dim %= len(shape)
    if not dim:
        return pieces.flatten(0, 1)
    shape[dim] *= len(pieces)
    return pieces.movedim(0, dim).reshape(shape)


def _split(tensor: Tensor, dim: int, parts: int) -> Tensor:
    """Cut a tensor along a dimension into pieces, a view of (parts, ...): undoes `_joined`."""
    dim %= tensor.dim()
    shape = tensor.shape
    cut = tensor.view(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    return cut.movedim(dim, 0)
