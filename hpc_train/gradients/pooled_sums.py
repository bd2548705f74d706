"""Sums of buckets that take turns in a small pool of memory: stage 2 of ZeRO.

Stage 2 (Rajbhandari et al., SC 2020, https://arxiv.org/abs/1910.02054) keeps of each gradient only
the parts that a rank's optimizer needs. So a bucket needs memory for the whole gradient only from
its first gradient to the end of its sum.

If a step has several backward passes, the owner of a part adds up its node's sums of the passes,
and only the last pass sends messages between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.collectives.node import aligned
from hpc_train.collectives.ring import Cross
from hpc_train.gradients.buckets import Bucket, Slab
from hpc_train.gradients.division import Reach
from hpc_train.gradients.sums import LevelSums
from hpc_train.mpi.levels import Levels

POOLED = 4  # buckets of the usual size that the pool has room for: filled, summed and sent


class Turns:
    """Places of buffers that use a piece of memory in turn, one behind the other and round again.

    Args:
        sizes: the buffers' sizes in bytes, in the order in which they are used.
        room: the size of the memory; at least the largest buffer.

    Attributes:
        begins: offset of each buffer, in bytes.
        before: for each buffer, how many places before it in the order the last buffer is that has
            memory in common with it. If that is the buffer itself, in its last use, it is the
            number of buffers.
    """

    def __init__(self, sizes: Sequence[int], room: int) -> None:
        self.sizes, self.begins = list(sizes), list[int]()
        place = 0
        for size in sizes:
            place = 0 if place + size > room else place
            self.begins.append(place)
            place += size
        count = len(sizes)
        self.before = [
            next((d for d in range(1, count) if self.meet(b, (b - d) % count)), count)
            for b in range(count)
        ]

    def meet(self, one: int, other: int) -> bool:
        """Whether two buffers have memory in common."""
        first, second = sorted((one, other), key=self.begins.__getitem__)
        return self.begins[second] < self.begins[first] + self.sizes[first] or one == other


def usual_size(sizes: Sequence[int]) -> int:
    """The smallest size for which buckets up to this size have half of all bytes.

    A few large buckets do not raise it, as they raise the mean. Many small ones do not lower it, as
    they lower the median: each stage of a model may end with one.
    """
    past = 0
    for size in sorted(sizes):
        past += size
        if 2 * past >= sum(sizes):
            return size
    return 0


class PooledSums(LevelSums):
    """`LevelSums` whose divided buckets take turns in a pool. Collective to make.

    A bucket may be filled and begun only if it is `free`, and in the order of numbers. Buckets that
    every rank needs whole have memory of their own.

    Args:
        levels, buckets, cross: as for `LevelSums`.
        reach: for each bucket, where its result is needed; the divided ones come first.
        by_pass: whether each gradient has to be in the sum of its own pass, so that each run adds
            in the same order. Else it may be in that of a later one, if it had to wait for memory.

    Attributes:
        turns: the places of the divided buckets.

    Raises:
        SetupError: there is too little shared memory; raised on all ranks of the node.
    """

    def __init__(
        self,
        levels: Levels,
        buckets: Sequence[Bucket],
        cross: Cross | None,
        reach: Sequence[Reach],
        *,
        by_pass: bool = False,
    ) -> None:
        self.by_pass = by_pass
        self.divided = sum(each is not Reach.RANK for each in reach)
        """The number of divided buckets."""
        sizes = [aligned(bucket.nbytes) for bucket in buckets[: self.divided]]
        self.room = min(max([POOLED * usual_size(sizes), *sizes]), sum(sizes))
        """Size of the pool in bytes."""
        self.turns = Turns(sizes, self.room)
        super().__init__(levels, buckets, cross, reach=reach)
        self.passes = 0
        # Replaced, and never changed: the gradients thread writes it while the program reads it.
        self._under_way: frozenset[int] = frozenset()
        self._turns: dict[int, tuple[bool, bool]] = {}
        """For each bucket, whether its sum is that of a step's first pass, and of its last."""
        self._results: list[Tensor] = []
        self.expect(1)

    def _begins(self) -> list[int]:
        kept = [self.room]
        for bucket in self.buckets[self.divided :]:
            kept.append(kept[-1] + aligned(bucket.nbytes))
        return [*self.turns.begins, *kept]

    def expect(self, passes: int) -> None:
        """Get ready for another number of backward passes per step. Only between two steps."""
        if passes == self.passes:
            return
        self.passes = passes
        self._results = []  # frees the memory before more is taken
        for number, bucket in enumerate(self.buckets[: self.divided]):
            begin, end = self._kept(number)
            self._results.append(torch.zeros(end - begin, dtype=bucket.dtype))

    def _kept(self, number: int) -> tuple[int, int]:
        """Start and end of what this rank keeps of a divided bucket, in elements."""
        division = self.division
        return division.part(number) if self.passes > 1 else division.own(number)

    def result(self, number: int, slab: Slab) -> Tensor:
        """A view of the result of a divided bucket, for a slab of what this rank owns."""
        begin, _ = self._kept(number)
        return replace(slab, begin=slab.begin - begin).of(self._results[number])

    def free(self, number: int) -> bool:
        """Whether no sum is under way that uses a bucket's memory, or the bucket's own."""
        under_way = self._under_way
        if number >= self.divided:
            return number not in under_way
        pooled = (other for other in under_way if other < self.divided)
        return not any(self.turns.meet(number, other) for other in pooled)

    def begin_pass(self, number: int, *, first: bool, last: bool) -> Coroutine[None]:
        """Sum a bucket's gradients of one backward pass. All ranks must begin them in one order.

        Args:
            number: the bucket's number.
            first: whether it is the step's first pass.
            last: whether it is the step's last pass.
        """
        self._under_way |= {number}
        self._turns[number] = first, last
        yield from self.begin(number)
        self._under_way -= {number}

    def _sum_part(self, number: int) -> Coroutine[None]:
        if number >= self.divided:
            yield from super()._sum_part(number)
            return
        first, last = self._turns[number]
        begin, end = self.division.part(number)
        parts = [buffer[begin:end] for buffer in self._buffers[number]]
        mine, kept = parts[self.levels.node.rank], self._results[number]
        if len(parts) > 1 and self._shares is None:
            self._add(parts, [mine])
        if not last:
            (kept.copy_ if first else kept.add_)(mine)
            return
        if not first:
            mine.add_(kept)
        if self.cross is not None:
            yield from self._sum_across(number, mine)
        own, last_own = self.division.own(number)
        at = own - self._kept(number)[0]
        kept[at : at + last_own - own].copy_(mine[own - begin : last_own - begin])

    def close(self) -> None:
        """Release shared memory. Collective."""
        self._results = []
        super().close()
