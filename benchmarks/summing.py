"""Candidates for benchmarks of single sums. Only ranks import this module, as it starts MPI.

Each candidate is a function. It fills a buffer with numbers whose sum is known, times the sum from
a barrier until the last rank has finished, and fails if the result is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter

from benchmarks import harness
from hpc_train.collectives.coroutines import drive
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.sums import LevelSums
from hpc_train.mpi.group import Group

MB = 1 << 20
ROW = 1 << 16  # number of elements
Candidate = Callable[[], float]


def bucket(nbytes: int) -> Bucket:
    """A bucket of `nbytes` bytes of float32."""
    return Bucket([Parameter(torch.empty(nbytes // 4), requires_grad=False)])


def fill(flat: Tensor, rank: int) -> None:
    """Write a rank's numbers. They are small integers, so that sums are exact."""
    rows = flat.view(-1, ROW)
    torch.add(_columns(), torch.arange(len(rows), dtype=flat.dtype)[:, None] + rank, out=rows)


def check(name: str, flat: Tensor, ranks: int) -> None:
    """Fail unless `flat` has the sums of all ranks' numbers."""
    sums = ranks * _columns() + ranks * (ranks - 1) // 2
    for number, row in enumerate(flat.view(-1, ROW)):
        if not torch.equal(row, sums + ranks * number):
            raise RuntimeError(f"{name}: wrong sums in row {number}")


def _columns() -> Tensor:
    return torch.arange(ROW, dtype=torch.float32) % 61


def seconds(
    group: Group, flat: Tensor, call: Callable[[], object], verify: Callable[[], None], repeat: int
) -> float:
    """The mean seconds of a call until the last rank has finished. Collective.

    Args:
        group: the ranks.
        flat: the buffer, which is filled before each call.
        call: the function to time.
        verify: fails if the result is wrong.
        repeat: number of calls.
    """
    total = 0
    for _ in range(repeat):
        fill(flat, group.rank)
        group.barrier()
        begin = time.perf_counter()
        call()
        taken = time.perf_counter() - begin
        harness.meet(group)  # it sleeps, so that ranks that have finished leave cores to others
        total += group.largest(int(1e9 * taken))
        verify()
    return total / repeat / 1e9


def ours(name: str, sums: LevelSums, number: int, polite: bool, repeat: int) -> Candidate:
    """The sum of one of our buckets. The result is in every rank's buffer, or in place."""
    group, flat = sums.levels.whole, sums.flats[number]
    begin = lambda: drive(sums.begin(number), polite=polite)  # noqa: E731

    def verify() -> None:
        check(name, flat if sums.whole[number] else read_in_place(sums, number), group.size)
        group.barrier()  # otherwise ranks would write what others still read

    return partial(seconds, group, flat, begin, verify, repeat)


def read_in_place(sums: LevelSums, number: int) -> Tensor:
    """Read a result in place: each rank of the node has its part in its own buffer."""
    assert sums.memory is not None
    flat, parts, cuts = sums.flats[number], sums.memory.parts, sums.division.cuts[number]
    begin = flat.data_ptr() - parts[sums.levels.node.rank].data_ptr()
    buffers = [part[begin : begin + flat.nbytes].view(flat.dtype) for part in parts]
    return torch.cat([buffer[cuts[i] : cuts[i + 1]] for i, buffer in enumerate(buffers)])


def allreduce(group: Group, flat: Tensor, repeat: int) -> Candidate:
    """The sum by MPI_Allreduce, blocking and in place."""
    assert group.comm is not None
    call = partial(group.comm.Allreduce, MPI.IN_PLACE, flat.numpy())
    verify = partial(check, "MPI_Allreduce", flat, group.size)
    return partial(seconds, group, flat, call, verify, repeat)


def gloo(group: Group, flat: Tensor, repeat: int) -> Candidate:
    """The sum by torch.distributed, which must have been started."""
    call = partial(torch.distributed.all_reduce, flat)
    return partial(seconds, group, flat, call, partial(check, "gloo", flat, group.size), repeat)


def copy(group: Group, flat: Tensor, count: int, repeat: int) -> Candidate:
    """A copy of the first `count` elements, by all ranks at the same time."""
    source, target = flat[:count], torch.zeros(count)

    def verify() -> None:
        if not torch.equal(source, target):
            raise RuntimeError("the copy is another")

    return partial(seconds, group, flat, partial(target.copy_, source), verify, repeat)
