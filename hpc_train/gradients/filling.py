"""Hooks of the backward pass fill the buckets, and begin the sums of full ones."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hpc_train.collectives.streams import stream_now
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.pending import has_graph, looked_too_early
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.slots import (
    DIRECT_WRITER,
    UNSTEADY,
    GradientWriter,
    Slot,
    slots_of_buckets,
)
from hpc_train.gradients.sums import Sums
from hpc_train.mpi.group import Group

ENGINE = torch.autograd.Variable._execution_engine
CONVERT_BEFORE = "convert the model and change the optimizer before averaging is set up"
STEADY = 2  # after this number of steps without anything unusual, sums begin in the backward pass


class Filling:
    """The slots of an averager's parameters, and how far a step's buckets are.

    Args:
        buckets: in the order in which their sums begin.
        sums: sums these buckets.
        progress: advances the sums.
        share: factor for all gradients; 1 / ranks makes their sum the mean.
        look: the `average` of `Slot`.
        begin_pass: is called before the first gradient of each backward pass is taken.
        writer: writes gradients to the buckets.

    Attributes:
        slots: the slots of all parameters in buckets.
        strays: the slots of parameters that came later and are in no bucket yet.
        zeros: the slots whose `grad` is None, but stands for zeros.
        begun: how many sums have begun in this step.
        over: whether the step is averaged; the next gradient begins another step.
        stirred: whether the step has begun, so that there is something to give up.
        early: whether sums begin in the backward pass; the same on all ranks.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        sums: Sums,
        progress: Progress,
        share: float,
        look: Callable[[Slot], Tensor],
        begin_pass: Callable[[], None],
        writer: GradientWriter = DIRECT_WRITER,
    ) -> None:
        self.sums, self.progress, self.share = sums, progress, share
        self.writer = writer
        self.by_bucket = self._make_slots(buckets, look)
        self.slots = [slot for some in self.by_bucket for slot in some]
        self.strays: list[Slot] = []
        self.zeros: set[Slot] = set()
        self.over = False
        self._look, self._begin_pass = look, begin_pass
        self._hooks = {slot: self._hook(slot) for slot in self.slots}
        self._task = -1  # the backward pass that the last gradient came from
        self._on_gpus = not all(flat.is_cpu for flat in sums.flats)
        self._streams: dict[int, set[Any]] = {}
        """For each bucket, the streams of its GPU that have written gradients to it."""
        # A backward pass has a thread for each GPU and one for the processor.
        self._lock = threading.RLock()
        self.wait_for_calm()
        self.begin_step()

    def _make_slots(
        self, buckets: Sequence[Bucket], look: Callable[[Slot], Tensor]
    ) -> list[list[Slot]]:
        return slots_of_buckets(buckets, self.sums.flats, self.share, look, self.writer)

    def _hook(self, slot: Slot) -> list[RemovableHandle]:
        return [slot.parameter.register_post_accumulate_grad_hook(partial(self._moved, slot))]

    def _moved(self, slot: Slot, parameter: Tensor) -> None:
        with self._lock:
            self._move(slot, parameter)

    @property
    def all_slots(self) -> list[Slot]:
        """The slots of parameters in buckets, and the strays."""
        return self.slots + self.strays

    def begin_step(self) -> None:
        """Begin a step: no gradient of it has come yet."""
        self.part()
        for slot in self.all_slots:
            slot.begin_step()
        self._left = self._missing.copy()
        self.begun = 0
        self.over = self.stirred = False

    def part(self) -> None:
        """Leave the gradients of a step that is over to code that still has them."""
        for slot in self.all_slots:
            slot.part(averaged=self.over)

    def wait_for_calm(self) -> None:
        """Begin no sums in the backward pass until STEADY steps in a row had nothing unusual."""
        self._calm = 0  # steps in a row without anything unusual
        self.early = False
        self._missing = [math.inf] * len(self.by_bucket)

    def learn(self, *, restless: bool) -> None:
        """Decide when the next step's sums begin.

        Args:
            restless: something unusual has happened on some rank; the same on all ranks.
        """
        self._calm = 0 if restless else self._calm + 1
        self.early = self._calm >= STEADY
        for number, some in enumerate(self.by_bucket):
            for slot in some:
                slot.learn()
            # Nobody knows when a bucket with an unsteady parameter is full: `average` sums it.
            steady = self.early and all(slot.expected != UNSTEADY for slot in some)
            self._missing[number] = sum(s.expected > 0 for s in some) if steady else math.inf

    def _move(self, slot: Slot, parameter: Tensor) -> None:
        """Put a gradient that a backward pass has just made into its bucket."""
        gradient = parameter.grad
        # torch numbers the backward passes of a process.
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            self._begin_pass()
            ENGINE.queue_callback(self._end_pass)  # runs at the end of this backward pass
        if gradient is None:
            raise looked_too_early()
        promise = slot.pending
        if parameter.dtype is not promise.dtype or parameter.device != promise.device:
            raise UserError(
                f"the model has moved a parameter from {promise.dtype} on {promise.device} to "
                f"{parameter.dtype} on {parameter.device}",
                CONVERT_BEFORE,
            )
        if gradient is not promise:
            if gradient.requires_grad:
                raise has_graph()
            self.stirred = True
            slot.take(gradient)
            parameter.grad = slot.pending
        elif not (slot.filled or slot.begun):
            raise UserError(
                "a backward pass came after the gradients were averaged, and with memory.zero "
                "nothing can be added to averaged gradients",
                "call zero_grad before each step's first backward pass, and the averager's norm "
                "and scale_ after its last one",
            )
        slot.arrived += 1
        if self._on_gpus:
            self._streams.setdefault(slot.home, set()).add(stream_now(slot.view))
        self._arrived(slot)

    def _end_pass(self) -> None:
        """Refuse what later hooks of the program have put in the place of promises."""
        for slot in self.all_slots:
            gradient = slot.parameter.grad
            if slot.filled and gradient is not None and gradient is not slot.pending:
                raise looked_too_early()
        self.promise()

    def promise(self) -> None:
        """Promise the mean of parameters that no backward pass has reached on this rank."""
        if not self.over:
            for slot in self.all_slots:
                slot.promise()

    def _arrived(self, slot: Slot) -> None:
        """Count a gradient, and begin the sums of buckets that now have all their gradients."""
        if slot.arrived == slot.expected:
            self._left[slot.home] -= 1
            # A full bucket waits for those before it: all ranks must begin sums in one order.
            while self.begun < len(self.by_bucket) and not self._left[self.begun]:
                self._begin_next()
        self.progress.advance()

    def _begin_next(self) -> None:
        for slot in self.by_bucket[self.begun]:
            slot.begin()
        if streams := self._streams.pop(self.begun, None):
            # A hook has the stream of its parameter's forward pass, which may not be this one.
            here = stream_now(self.sums.flats[self.begun])
            for other in streams - {here}:
                here.wait_stream(other)
        self.progress.start(self.sums.begin(self.begun))
        self.begun += 1

    def sum_rest(self) -> None:
        """Begin the sums that have not begun, and wait for all sums. Collective."""
        while self.begun < len(self.by_bucket):
            self._begin_next()
        self.progress.finish()

    def give_up(self) -> None:
        """Finish the sums of a step whose result is not used. Collective."""
        for slot in self.slots:
            slot.set_apart()
        self.sum_rest()
        self.wait_for_calm()

    def dropped(self) -> tuple[list[Slot], bool]:
        """Slots whose gradient was dropped by model.zero_grad() or `grad = None`.

        Returns:
            These slots, and whether the whole step was dropped.
        """
        filled = [slot for slot in self.all_slots if slot.filled]
        dropped = [slot for slot in filled if slot.parameter.grad is not slot.pending]
        # Gradients that an earlier step has left may stay: they are not of this step.
        new = [slot for slot in filled if slot.kept is None]
        return dropped, all(slot.parameter.grad is not slot.pending for slot in new)

    def used(self) -> np.ndarray:
        """Flags of the parameters that have a gradient, (slots,) of bool."""
        return np.array([s.has_gradient or s in self.zeros for s in self.slots], bool)

    def check(self) -> tuple[bool, HpcTrainError | None]:
        """Look through all gradients before averaging.

        Returns:
            Whether some gradients came too late for their bucket, and an error to raise, if any.
        """
        late = False
        for slot in self.all_slots:
            gradient = slot.parameter.grad
            late = late or slot.late is not None
            if gradient is None or gradient is slot.pending:
                continue
            if gradient.requires_grad:
                return late, has_graph()
            if any(gradient is other.pending for other in self.all_slots):
                return late, UserError(
                    "`grad` of a parameter was set to that of another one, which was not averaged",
                    "set it to a copy: `p.grad = other.grad.clone()`",
                )
            if slot.in_sum and not self.over:
                if slot.filled:
                    return late, UserError(
                        "`grad` of a parameter was set after its sum over the ranks had begun",
                        "set it before the backward pass, or change it after averaging",
                    )
                late = True
        return late, None

    def collect(self) -> None:
        """Take over `grad` of parameters where the user has dropped or replaced it."""
        if self.over:  # another rank has new gradients: those not dropped here count again
            self.begin_step()
        for slot in self.all_slots:
            if slot.lacks:
                slot.parameter.grad = None
            gradient = slot.parameter.grad
            if gradient is None:
                slot.filled, slot.late = False, None
            elif gradient is not slot.pending:
                slot.take(gradient)

    def renewed(self) -> bool:
        """Whether the program has put other gradients in the place of averaged ones."""
        gradients = ((slot, slot.parameter.grad) for slot in self.all_slots)
        return any(
            g is not None and g is not s.pending and g is not s.gradient for s, g in gradients
        )

    def differ(self, group: Group) -> bool:
        """Whether the ranks have different averaged gradients. Collective.

        Averaging made them the same. So if they differ, the program has written others into them,
        which torch does not always count as a change of the tensor (`p.grad.data.copy_(...)`).
        """
        found = xxhash.xxh3_128()
        for number, slot in enumerate(self.all_slots):
            gradient = slot.parameter.grad
            if gradient is not None and gradient is not slot.pending:
                found.update(f"{number} ".encode())
                flat = gradient.detach().contiguous().view(-1)
                found.update(flat.view(torch.uint8).cpu().numpy().data)
        return len(set(group.gathered(found.digest()))) > 1

    def show(self) -> None:
        """Replace the promise in `grad` by the averaged gradient itself."""
        for slot in self.all_slots:
            if slot.parameter.grad is slot.pending:
                slot.parameter.grad = None if slot.hollow else slot.gradient

    def adopt(self, parameters: Sequence[Parameter]) -> None:
        """Make slots for parameters that came later, with memory of their own."""
        known = {id(slot.parameter) for slot in self.strays}
        for parameter in parameters:
            if id(parameter) not in known:
                slot = Slot(parameter, parameter.detach().clone(), -1, self.share, self._look)
                self.strays.append(slot)
                self._hooks[slot] = self._hook(slot)
                gradient = parameter.grad
                if gradient is not None and not gradient.requires_grad:
                    slot.take(gradient)
                    parameter.grad = slot.pending

    def gradients(self) -> list[Tensor]:
        """All averaged gradients; one tensor for a bucket if each `grad` is a view of it."""
        found = [s.parameter.grad for s in self.strays if s.parameter.grad is not None]
        for some, flat in zip(self.by_bucket, self.sums.flats, strict=True):
            if all(slot.in_bucket for slot in some):
                found.append(flat)
            else:
                found += [s.parameter.grad for s in some if s.parameter.grad is not None]
        return found

    def drop(self) -> None:
        """Drop all gradients."""
        for slot in self.all_slots:
            slot.parameter.grad = None

    def leave(self, parameters: Collection[Parameter]) -> dict[Parameter, Parameter]:
        """Leave parameters to another averager; they must be in buckets.

        Returns:
            For each of them its stand-in here, which never gets a gradient: its place in the
            bucket counts as zeros.
        """
        left = [slot for slot in self.slots if slot.parameter in parameters]
        self._leave(left)
        stands = {}
        for slot in left:
            stand = Parameter(slot.parameter.new_empty(0), requires_grad=False)
            stands[slot.parameter] = stand
            slot.parameter, slot.filled, slot.hollow, slot.late = stand, False, False, None
            self.zeros.discard(slot)
        return stands

    def _leave(self, slots: Sequence[Slot]) -> None:
        """Remove the hooks of slots; gradients that lie in buckets are copied."""
        for slot in slots:
            for hook in self._hooks.pop(slot, ()):
                hook.remove()
            slot.part(averaged=self.over)
            if slot.gradient is not None and slot.parameter.grad is slot.gradient:
                slot.parameter.grad = slot.gradient = slot.gradient.clone()
            elif slot.parameter.grad is slot.pending:
                slot.parameter.grad = None

    def release(self) -> None:
        """Remove the hooks; gradients that lie in buckets are copied. Collective."""
        slots = self.all_slots
        self._leave(slots)
        self.by_bucket, self.slots, self.strays = [], [], []
        self.zeros = set()
        while slots:
            slots.pop().forget()
        self.writer.close()
        self.sums.close()
