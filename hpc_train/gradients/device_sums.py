"""Sums of buckets in the memory of GPUs, over all ranks or over those of each node."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.collectives.device import DeviceCollectives
from hpc_train.collectives.node import NodeMemory
from hpc_train.collectives.ring import Cross
from hpc_train.errors import SetupError, UserError
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.profile import Profile
from hpc_train.gradients.staging import CopyLane, PinnedMemory
from hpc_train.gradients.sums import bucket_begins, cut_memory
from hpc_train.mpi.levels import Levels


class DeviceSums:
    """Implements `Sums` by one sum over the GPUs of all ranks for each bucket.

    A sum has ended when its result is there. Work that the device gets afterwards, on any stream,
    sees it.

    Args:
        everyone: connects the GPUs of the ranks.
        buckets: on this rank's GPU.

    Attributes:
        early: False if MPI reads GPU memory. NVIDIA warns of deadlocks if it does that while NCCL
            sums, and the backward pass may send messages.

    Raises:
        UserError: a bucket is on another device; all ranks raise it.
    """

    def __init__(self, everyone: DeviceCollectives, buckets: Sequence[Bucket]) -> None:
        from hpc_train.collectives.mpi import reads_gpu_memory  # here, because it starts MPI

        for other in {bucket.device for bucket in buckets} - {everyone.device}:
            raise UserError(
                f"a parameter is on {other}, and engine nccl sums on {everyone.device}",
                "move it there, or use engine mpi",
            )
        self.profile = Profile()
        self.early = not reads_gpu_memory()
        self._everyone = everyone
        self._wholes = self._padded(buckets, everyone.group.size)
        self.flats = [w[: b.numel] for w, b in zip(self._wholes, buckets, strict=True)]

    def _padded(self, buckets: Sequence[Bucket], parts: int) -> list[Tensor]:
        """Zeros for each bucket, and for as many more elements as make equal parts of one or more.

        Args:
            buckets: (n,) each.
            parts: number of parts.
        """
        sizes = [parts * max(1, -(-bucket.numel // parts)) for bucket in buckets]
        return [
            torch.zeros(size, dtype=bucket.dtype, device=bucket.device)
            for size, bucket in zip(sizes, buckets, strict=True)
        ]

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket (see `Sums`), after the work that the caller's stream has by now."""
        # Not in the coroutine, which may run in a thread that has another stream.
        begun = time.perf_counter()
        return self._noted(number, self._everyone.sum_(self._wholes[number]), begun)

    def _noted(self, number: int, steps: Coroutine[None], begun: float) -> Coroutine[None]:
        yield from steps
        end, note = time.perf_counter(), self._everyone.group.waiting.phases.note
        note("bucket", "sum of bucket %d", begun, end, number)
        self.profile.add(0.0, end - begun, self.flats[number].nbytes)

    def close(self) -> None:
        """Release the buffers."""
        self.flats, self._wholes = [], []


class DeviceNodeSums(DeviceSums):
    """Implements `Sums` by sums over the GPUs of each node, and messages between the nodes.

    The GPUs of a node sum a bucket, so that each gets one part of it. The part is copied to the
    node's memory and summed there with the same part of the other nodes. Then each GPU reads all
    parts from the node's memory. The GPUs do not gather them from each other, because that would be
    a second kind of operation over GPUs. Its order among the sums would have to be the same on all
    ranks, and it depends on when messages arrive.

    Collective to make.

    Args:
        levels: the ranks by nodes, the same number of two or more on each.
        inside: connects the GPUs of the node's ranks.
        buckets: on this rank's GPU.
        cross: the ranks of different nodes that have this rank's part, closed with this object.

    Raises:
        SetupError: there is too little shared memory; raised on all ranks of the node.
    """

    def __init__(
        self, levels: Levels, inside: DeviceCollectives, buckets: Sequence[Bucket], cross: Cross
    ) -> None:
        super().__init__(inside, buckets)
        self._cross, self._ranks = cross, range(levels.node.size)
        self._parts = [torch.empty_like(w[:: levels.node.size]) for w in self._wholes]
        begins = bucket_begins(self._parts)
        try:
            self._memory = NodeMemory(levels.node, begins[-1], signals=len(buckets))
        except SetupError:
            cross.close()
            raise
        of_ranks = [cut_memory(part, self._parts, begins) for part in self._memory.parts]
        self._host_parts = list(zip(*of_ranks, strict=True))  # by bucket, then by rank of the node
        self._mine = of_ranks[levels.node.rank]
        # Two lanes, as a GPU copies in both directions at once.
        self._away, self._back = CopyLane(inside.device), CopyLane(inside.device)
        self._pinned = [PinnedMemory(inside.device, some) for some in of_ranks]
        self._across = levels.whole.waiting.traffic.of("gradient sums", "across")
        self._rounds = [0] * len(buckets)
        self._begun = self._passed = 0

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket (see `Sums`), after the work that the caller's stream has by now."""
        begun = time.perf_counter()
        summed = self._everyone.sum_part(self._wholes[number], self._parts[number])
        self._rounds[number] += 1
        self._begun += 1
        steps = self._summed(number, summed, self._rounds[number], self._begun - 1)
        return self._noted(number, steps, begun)

    def _summed(
        self, number: int, inside: Coroutine[None], round_: int, turn: int
    ) -> Coroutine[None]:
        yield from inside
        mine = self._mine[number]
        mark = self._away.copy(self._parts[number], mine, after_device=False)
        # A later copy may be seen to have ended before an earlier one. Yet all nodes must begin
        # operations between nodes in the same order, because MPI pairs collectives by it.
        yield lambda: self._passed == turn and mark.query()
        self._passed += 1
        with self._across:
            yield from self._cross.sum_(mine, number)
        self._across.nbytes += self._cross.bytes_sent - self.profile.sent
        self.profile.sent = self._cross.bytes_sent
        self._memory.tell(number, round_)
        yield from self._memory.wait(number, round_, self._ranks)
        pieces = self._wholes[number].split(len(mine))
        for piece, part in zip(pieces, self._host_parts[number], strict=True):
            mark = self._back.copy(part, piece, after_device=False)
        yield mark.query  # the lane ends copies in their order

    def close(self) -> None:
        """Release the buffers. Collective."""
        for lane in (self._away, self._back):
            lane.finish()
        for pinned in self._pinned:
            pinned.close()
        self._host_parts, self._mine = [], []
        super().close()
        self._memory.close()
        self._cross.close()
