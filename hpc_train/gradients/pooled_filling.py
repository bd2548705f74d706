"""Fills buckets that take turns in a pool of memory (see `pooled_sums`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.filling import Filling
from hpc_train.gradients.pooled_sums import PooledSums
from hpc_train.gradients.slots import UNSTEADY, Slot, slots_of_buckets

PATIENCE = 2.0
"""Seconds that a backward pass waits for memory of the pool. Then it goes on with gradients in
memory of its own. So ranks that do different things, such as one without samples, meet in `average`
instead of waiting for ever."""


class PooledSlot(Slot):
    """A `Slot` whose part of the bucket is there only while it is the bucket's turn.

    Args:
        open_: whether the bucket's memory may be written in its next turn.
        sums: the sums of the bucket's turns.
        more: a `Slot`'s arguments.

    Attributes:
        held: by turn, gradients that wait for the bucket's memory, multiplied by the share.
        written: whether the bucket has a gradient of the next turn.
        sent: how many sums of this step have begun: the number of the next turn.
    """

    __slots__ = ("held", "open", "sent", "sums", "written")

    def __init__(self, open_: Callable[[], bool], sums: PooledSums, *more: Any) -> None:
        super().__init__(*more)
        self.open, self.sums = open_, sums
        self.held: dict[int, Tensor] = {}
        self.written, self.sent = False, 0

    def begin_step(self) -> None:
        """Begin a step: no gradient of it has come yet."""
        super().begin_step()
        self.held, self.written, self.sent = {}, False, 0

    def take(self, gradient: Tensor) -> None:
        """Take the step's first gradient, or one that the user has put in its place."""
        if not self.sent:
            self.writer.wait(self.last_write)
            self.held, self.written = {}, False
        self._put(gradient)
        self.filled = True

    def add(self, gradient: Tensor) -> None:
        """Add a further gradient of the step."""
        self._put(gradient)

    def _put(self, gradient: Tensor) -> None:
        writer, share, turn = self.writer, self.share, self._turn()
        if self.begun:
            super().add(gradient)
        elif turn in self.held:
            self.last_write = writer.add(gradient, share, self.held[turn])
        elif turn > self.sent or not self.open():
            self.held[turn] = writer.room(self.view)
            self.last_write = writer.write(gradient, share, self.held[turn])
        elif self.written:
            self.last_write = writer.add(gradient, share, self.view)
        else:
            self.last_write = writer.write(gradient, share, self.view)
            self.written = True

    def _turn(self) -> int:
        """The turn for a gradient that comes now."""
        if not self.sums.by_pass:
            return self.sent
        return max(self.sent, min(self.arrived, self.sums.passes - 1))

    @property
    def in_sum(self) -> bool:
        """Whether a sum has begun that has a gradient of this step, if there was one."""
        return self.sent > 0

    def begin_turn(self) -> None:
        """Prepare for the sum of a pass that is not the last: a missing gradient counts as zero."""
        held = self.held.pop(self.sent, None)
        if held is not None or not self.written:  # else the sum waits
            self.writer.wait(self.last_write)
        if held is None:
            if not self.written:
                self.view.zero_()
        elif self.written:
            self.view.add_(held)
        else:
            self.view.copy_(held)
        self.written = False
        self.sent += 1

    def begin(self) -> None:
        """Prepare for the sum of the last pass."""
        self.begin_turn()
        self.begun = True


class PooledFilling(Filling):
    """`Filling` for `PooledSums`.

    A step has a turn for each bucket and backward pass. Turns begin in one order on all ranks: by
    passes, then by buckets. Buckets that are not divided have a turn in the last pass only. A turn
    begins when the pass has made all gradients of the bucket, and the memory is free.

    Gradients that come before it is the bucket's turn wait in memory of their own. If they are as
    many as the pool has room for, the backward pass waits. Ranks wait only for turns that all of
    them have begun or will begin without waiting for later ones, so they do not wait for ever.
    """

    sums: PooledSums
    _impatient = 0  # steps to go without waiting for memory
    _next = 1

    def _make_slots(
        self, buckets: Sequence[Bucket], look: Callable[[Slot], Tensor]
    ) -> list[list[Slot]]:
        def make(parameter: Parameter, view: Tensor, home: int, *more: Any) -> Slot:
            if home >= self.sums.divided:
                return Slot(parameter, view, home, *more)
            return PooledSlot(lambda: self._open(home), self.sums, parameter, view, home, *more)

        return slots_of_buckets(buckets, self.sums.flats, self.share, look, self.writer, make)

    def wait_for_calm(self) -> None:
        """Expect a gradient in each pass for each parameter."""
        self.early = True
        for slot in self.slots:
            slot.before = slot.expected = self.sums.passes
        self._plan_turns()

    def learn(self, *, restless: bool) -> None:
        """Expect what has come in the last two steps."""
        for slot in self.slots:
            slot.learn()
        self._plan_turns()

    def _plan_turns(self) -> None:
        """Count the gradients that each turn waits for."""
        passes = self.sums.passes
        regular = [float(sum(s.expected == passes for s in some)) for some in self.by_bucket]
        if self.sums.by_pass:
            for number, some in enumerate(self.by_bucket):
                if regular[number] < len(some):  # nobody knows in which passes the others come
                    regular[number] = math.inf
        last = [
            math.inf if any(s.expected == UNSTEADY for s in some) else sum(map(_comes, some))
            for some in self.by_bucket
        ]
        self._awaited: list[list[float]] = [
            *(regular.copy() for _ in range(passes - 1)),
            last,
        ]
        self._turns = (passes - 1) * self.sums.divided + len(self.by_bucket)

    def begin_step(self) -> None:
        """Begin a step: no gradient of it has come yet."""
        self.part()
        for slot in self.slots:
            slot.begin_step()
        self._lacking = [row.copy() for row in self._awaited]
        self._sent = [0] * len(self.by_bucket)
        self._waiting: dict[PooledSlot, int] = {}  # bytes of the gradients that wait
        self._impatient = max(0, self._impatient - 1)
        self.begun = 0
        self.over = self.stirred = False

    def _turn(self) -> tuple[int, int]:
        """The pass and the bucket of the turn that begins next."""
        whole = (self.sums.passes - 1) * self.sums.divided
        if self.begun >= whole:
            return self.sums.passes - 1, self.begun - whole
        return divmod(self.begun, self.sums.divided)

    def _open(self, number: int) -> bool:
        """Whether a bucket's memory may be filled: all turns before it are over that use it."""
        place = self._sent[number] * self.sums.divided + number
        return place - self.sums.turns.before[number] < self.begun and self.sums.free(number)

    def _arrived(self, slot: Slot) -> None:
        """Count a gradient, and begin the turns that now have all their gradients."""
        passes = self.sums.passes
        if slot.home < self.sums.divided and slot.expected == passes:
            if slot.arrived <= passes:
                self._lacking[slot.arrived - 1][slot.home] -= 1
        elif slot.arrived == slot.expected:
            self._lacking[-1][slot.home] -= 1
        if isinstance(slot, PooledSlot) and slot.held:
            self._waiting[slot] = _bytes_of(slot)
        self._begin_full()
        self.progress.advance()
        if sum(self._waiting.values()) > self.sums.room:
            self._wait()

    @property
    def _full(self) -> bool:
        """Whether the next turn has all its gradients."""
        if self.begun == self._turns:
            return False
        pass_, number = self._turn()
        return not self._lacking[pass_][number]

    @property
    def _free(self) -> bool:
        """Whether the memory of the next turn's bucket is free."""
        return self.sums.free(self._turn()[1])

    def _begin_full(self) -> None:
        while self._full and self._free:
            self._begin_next()

    def _begin_next(self) -> None:
        self._until(lambda: self._free)
        pass_, number = self._turn()
        last = pass_ == self.sums.passes - 1
        for slot in self.by_bucket[number]:
            if last:
                slot.begin()
            else:
                assert isinstance(slot, PooledSlot)
                slot.begin_turn()
        self._waiting = {s: _bytes_of(s) for s in self._waiting if s.held}
        self._sent[number] += 1
        self.begun += 1
        self.progress.start(self.sums.begin_pass(number, first=pass_ == 0, last=last))

    def _until(self, over: Callable[[], bool]) -> None:
        def waited() -> Coroutine[None]:
            yield over

        if not over():
            self.progress.complete(waited())

    def _wait(self) -> None:
        """Wait until the gradients that wait fit into the pool."""
        end = time.monotonic() + PATIENCE
        while not self._impatient and self._full and sum(self._waiting.values()) > self.sums.room:
            self._until(lambda: self._free or time.monotonic() > end)
            if not self._free:  # it may be so in each step: wait in fewer and fewer of them
                self._impatient = self._next = min(2 * self._next, 1 << 10)
            self._begin_full()

    def sum_rest(self) -> None:
        """Begin the turns that have not begun, and wait for all sums. Collective."""
        while self.begun < self._turns:
            self._begin_next()
        self.progress.finish()


def _bytes_of(slot: PooledSlot) -> int:
    """Bytes of the gradients that wait."""
    return sum(tensor.nbytes for tensor in slot.held.values())


def _comes(slot: Slot) -> bool:
    return slot.expected > 0
