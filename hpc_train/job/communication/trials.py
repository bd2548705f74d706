"""The operations that `hpc-train info collectives` times, and the implementations of each.

A trial is one operation of one implementation at one size. Its tensors are float32. What the ranks
bring are small integers, so that sums are exact and every result can be checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.collectives.coroutines import Coroutine, drive
from hpc_train.collectives.halving import Halving
from hpc_train.collectives.protocol import Collectives
from hpc_train.collectives.ring import Ring
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.sums import LevelSums
from hpc_train.job.communication.figures import (
    ACROSS,
    ALL,
    ALLGATHER,
    ALLREDUCE,
    BARE,
    BARRIER,
    BROADCAST,
    HALVING,
    HOROVOD,
    INSIDE,
    MPI,
    PING_PONG,
    PIPELINE,
    REDUCE_SCATTER,
    RING,
    SHARED,
    OperationName,
)
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.parallel.transport import Message, Transport

REMAINDERS = 61  # numbers repeat with this period, a prime: a shifted result is seen
RANKS_TOLD_APART = 64  # larger ranks bring the numbers of smaller ones: sums stay exact

EVERYWHERE = (INSIDE, ACROSS, ALL)
SUMS = (ALLREDUCE, BROADCAST, ALLGATHER, REDUCE_SCATTER)
# The scopes in which an implementation has an operation.
OFFERED: dict[str, dict[str, tuple[str, ...]]] = {
    # The ends of all ranks are on different nodes, so their ping-pong is the one across nodes.
    BARE: {**dict.fromkeys((*SUMS, BARRIER), EVERYWHERE), PING_PONG: (INSIDE, ACROSS)},
    MPI: dict.fromkeys((*SUMS, BARRIER), EVERYWHERE),
    SHARED: {ALLREDUCE: (INSIDE,)},
    RING: {ALLREDUCE: (ACROSS, ALL), ALLGATHER: (ACROSS,), REDUCE_SCATTER: (ACROSS,)},
    HALVING: {ALLREDUCE: (ACROSS, ALL)},
    PIPELINE: {PING_PONG: (INSIDE, ACROSS)},
    HOROVOD: dict.fromkeys(SUMS, EVERYWHERE),
}
ON_PROCESSORS = (SHARED, RING, HALVING)  # these take tensors in host memory only


@dataclass(frozen=True)
class Where:
    """The ranks that carry out an operation.

    Args:
        levels: these ranks by nodes; `levels.whole` is their group.
        device: where the tensors are.
        polite: whether a rank that waits sleeps, because ranks share cores.
        hvd: the module horovod.torch, if it is running.
    """

    levels: Levels
    device: torch.device
    polite: bool = False
    hvd: Any = None

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.levels.whole

    def zeros(self, count: int) -> Tensor:
        """A float32 tensor on the device."""
        return torch.zeros(count, device=self.device)


@dataclass(frozen=True)
class Trial:
    """One operation, ready to be carried out many times.

    Args:
        call: carries it out. Collective.
        given: what this rank brings; the operation may overwrite it.
        result: where the result is afterwards; None: `call` returns it.
        close: releases what the trial holds. Collective.
    """

    call: Callable[[], object]
    given: Tensor
    result: Tensor | None
    close: Callable[[], None] = lambda: None


def make_trial(name: str, operation: OperationName, where: Where, count: int) -> Trial:
    """Prepare an operation. Collective over the group.

    Args:
        name: the implementation, a key of `OFFERED` that has the operation.
        operation: what to carry out.
        where: the ranks.
        count: number of elements (see `brought`); a multiple of the ranks for ALLGATHER and
            REDUCE_SCATTER.

    Raises:
        SetupError: there is too little shared memory; raised on all ranks of the node.
    """
    if name == BARE:
        return _bare(operation, where, count)
    if name == PIPELINE:
        return _by_transport(where, count)
    if name in (MPI, HOROVOD):
        return _by_collectives(operation, where, count, _collectives(name, where))
    kind = {SHARED: None, RING: Ring, HALVING: Halving}[name]
    if kind is None or where.levels.cross is not where.levels.whole:
        return _in_levels(where, count, kind)
    return _between_nodes(operation, where, count, kind(where.group))


def brought(operation: OperationName, group: Group, count: int) -> Tensor:
    """What a rank brings to an operation.

    Args:
        operation: which one.
        group: the ranks.
        count: number of elements of the largest buffer: of the result of ALLGATHER, of what a rank
            brings to others.
    """
    if operation == ALLGATHER:
        return _numbers(group.rank, count // group.size)
    if operation in (BROADCAST, PING_PONG) and group.rank:
        return torch.full((count,), -1.0)
    return _numbers(group.rank, count)


def expected(operation: OperationName, group: Group, count: int) -> Tensor:
    """The result that this rank must get; arguments as for `brought`."""
    if operation in (BROADCAST, PING_PONG):
        return _numbers(0, count)
    if operation == ALLGATHER:
        part = count // group.size
        return torch.cat([_numbers(rank, part) for rank in range(group.size)])
    shift = sum(rank % RANKS_TOLD_APART for rank in range(group.size))
    total = _numbers(0, count).mul_(group.size).add_(shift)
    if operation == REDUCE_SCATTER:
        return total.tensor_split(group.size)[group.rank]
    return total


def _numbers(rank: int, count: int) -> Tensor:
    index = torch.arange(count, dtype=torch.int32)
    return index.remainder_(REMAINDERS).float().add_(rank % RANKS_TOLD_APART)


def _bare(operation: OperationName, where: Where, count: int) -> Trial:
    """The operation by one call of mpi4py with buffers, as a C program would do it."""
    comm: Any = where.group.comm
    part = count // where.group.size
    given = where.zeros(part if operation == ALLGATHER else count)
    result = where.zeros(part if operation == REDUCE_SCATTER else count)
    out, into = _buffer(given), _buffer(result)
    if operation == BARRIER:
        return Trial(comm.Barrier, given, result)
    if operation == BROADCAST:
        return Trial(partial(comm.Bcast, out), given, given)
    if operation == PING_PONG:
        first = where.group.rank == 0
        return Trial(partial(_ping if first else _pong, comm, out, into), given, result)
    calls = {
        ALLREDUCE: comm.Allreduce,
        ALLGATHER: comm.Allgather,
        REDUCE_SCATTER: comm.Reduce_scatter_block,
    }
    return Trial(partial(calls[operation], out, into), given, result)


def _ping(comm: Any, out: Any, into: Any) -> None:
    comm.Send(out, 1)
    comm.Recv(into, 1)


def _pong(comm: Any, out: Any, into: Any) -> None:
    comm.Recv(into, 0)
    comm.Send(into, 0)


def _by_transport(where: Where, count: int) -> Trial:
    """A message there and back as a pipeline sends its activations."""
    transport, given = Transport(where.group, where.device), where.zeros(count)
    first = where.group.rank == 0
    message = Message(int(first), 0, "ping-pong", "a message there and back", told=False)
    transport.learn(message.kind, given)

    def call() -> Tensor:
        transport.expect([message])
        if first:
            transport.send(message, given)
        arrived = transport.receive()
        if not first:
            transport.send(message, arrived)
        transport.flush()
        transport.release(arrived)
        return arrived

    return Trial(call, given, None)


def _collectives(name: str, where: Where) -> Collectives:
    if name == MPI:
        from hpc_train.collectives.mpi import MpiCollectives

        return MpiCollectives(where.group)
    from hpc_train.collectives.horovod import HorovodCollectives

    return HorovodCollectives(where.group, where.hvd)


def _by_collectives(
    operation: OperationName, where: Where, count: int, collectives: Collectives
) -> Trial:
    """The operation as training calls it, on tensors."""
    given = where.zeros(count // where.group.size if operation == ALLGATHER else count)
    calls: dict[str, Callable[[], object]] = {
        ALLREDUCE: lambda: collectives.sum_(given),
        BROADCAST: lambda: collectives.broadcast_(given),
        ALLGATHER: lambda: collectives.start_gather(given, 0).wait(),
        REDUCE_SCATTER: lambda: collectives.start_sum_scatter(given, 0).wait(),
        BARRIER: where.group.barrier,
    }
    result = None if operation in (ALLGATHER, REDUCE_SCATTER) else given
    return Trial(calls[operation], given, result, collectives.close)


def _in_levels(where: Where, count: int, kind: type[Ring] | None) -> Trial:
    """A sum in the nodes' shared memory, and between the nodes if there are several."""
    levels = where.levels
    cross = kind(levels.cross) if kind is not None and levels.owns else None
    bucket = Bucket([Parameter(torch.empty(count, device="meta"), requires_grad=False)])
    sums = LevelSums(levels, [bucket], cross)
    given = sums.flats[0]
    return Trial(lambda: drive(sums.begin(0), polite=where.polite), given, given, sums.close)


def _between_nodes(operation: OperationName, where: Where, count: int, cross: Ring) -> Trial:
    """The operation by messages between ranks of different nodes."""
    group, whole = where.group, where.zeros(count)
    part = count // group.size
    cuts = [part * rank for rank in range(group.size + 1)]
    mine = whole[cuts[group.rank] : cuts[group.rank + 1]]
    begin: Callable[[int], Coroutine[Any]] = {
        ALLREDUCE: partial(cross.sum_, whole),
        ALLGATHER: partial(cross.all_gather_, whole, cuts),
        REDUCE_SCATTER: partial(cross.reduce_scatter_, whole, cuts),
    }[operation]
    tags = itertools.count()
    return Trial(
        lambda: drive(begin(next(tags)), polite=where.polite),
        mine if operation == ALLGATHER else whole,
        mine if operation == REDUCE_SCATTER else whole,
        cross.close,
    )


def _buffer(tensor: Tensor) -> Any:
    """A tensor in the form that mpi4py takes."""
    return tensor if tensor.is_cuda else tensor.numpy()
