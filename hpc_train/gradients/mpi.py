"""Engine mpi: flat buckets, summed over the ranks while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hpc_train.collectives import Collectives, connect
from hpc_train.collectives.alone import AloneCollectives
from hpc_train.collectives.coroutines import Coroutine
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.gradients import added
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.census import Facts, Place, told
from hpc_train.gradients.filling import Filling
from hpc_train.gradients.ownership import claim, disown, parameters_of, trained, trained_by
from hpc_train.gradients.profile import Profile
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.slots import Slot
from hpc_train.gradients.sums import LevelSums, Sums
from hpc_train.gradients.weight import sample_weight
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

MakeBuckets = Callable[[Sequence[Parameter]], tuple[Sequence[Bucket], Sums]]
"""Puts parameters into buckets and makes their sums; collective."""


class BucketAverager:
    """Implements `GradientAverager` with flat buckets.

    The backward pass makes a gradient in memory of its own; a hook moves it into its bucket while
    it is still in the processor's cache, divided by the number of ranks on the way. A bucket is
    thus written once, never zeroed, and its sum over the ranks is the mean.

    How many gradients a parameter gets in a step is not asked for, but learned: after two steps
    alike, a bucket's sum begins as soon as it has what it had in those. What comes after that is
    summed by itself in `average`. Buckets go in the same order on all ranks.

    `grad` of a parameter means what it does in one process. None: it was dropped, or never there.
    After a backward pass it stands for the mean (`PendingGradient`). What is not dropped is added
    to.

    Collective to make.

    Args:
        model: its parameters that require gradients take part, unless another averager has them.
        optimizer: its parameters take part; they need not be the model's.
        group: the ranks to average over.
        make: buckets and sums; none for one rank alone, which needs neither.
        progress: advances the sums.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: Group,
        make: MakeBuckets,
        progress: Progress,
    ) -> None:
        self.model, self.optimizer, self.group = model, optimizer, group
        self.progress = progress
        self.awaited = f"the sums of the gradients over {group.size} ranks"
        self.shards: Collectives = AloneCollectives(Group(waiting=group.waiting))
        """The ranks whose `parts` together cover every gradient: here this rank alone."""
        self.at_close: list[Callable[[], None]] = []
        """What to release."""
        self._make = make
        self._census = group.duplicate()
        self._collectives = connect(group)
        self._left_to_others: set[int] = set()  # ids of parameters
        self._restless = False  # something unusual has happened since the last average
        self._looked = False  # somebody has looked at a gradient before `average`
        self._drops = 0  # since the last average
        self._closed = False
        self._plan()
        # A user's own zero_grad begins a step here as well.
        self._zero_optimizer = optimizer.zero_grad
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._step_hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def _plan(self) -> None:
        """Put the parameters that are trained now into buckets. Collective."""
        self.trained = [
            p for p in trained(self.model, self.optimizer) if id(p) not in self._left_to_others
        ]
        self.buckets, self.sums = self._make(self.trained)
        self._filling = self._fill()
        self._done = False  # whether `average` has nothing to do until something happens
        self._outdated = False  # whether parameters have come or gone
        claim(self.trained, self)
        self._remember()

    def _fill(self) -> Filling:
        """What fills the buckets."""
        share = 1 / self.group.size
        return Filling(self.buckets, self.sums, self.progress, share, self._look, self._begin_pass)

    def _remember(self) -> None:
        """What the optimizer has now, to see when that changes."""
        self._known = [id(p) for p in parameters_of(self.optimizer)]
        self._frozen = [p for p in parameters_of(self.optimizer) if not p.requires_grad]

    def _unplan(self) -> None:
        """Undo `_plan`; gradients that lie in buckets are copied. Collective."""
        disown(self.trained)
        self._filling.release()

    def _replan(self) -> None:
        self._unplan()
        self._plan()

    @property
    def profile(self) -> Profile:
        """What averaging has taken."""
        return self.sums.profile

    def zero_grad(self) -> None:
        """Forget the gradients, also those that the optimizer does not have."""
        self.optimizer.zero_grad()
        for parameter in self.trained:
            parameter.grad = None

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """In place of the optimizer's."""
        if self._filling.stirred:
            self._give_up()
        if not set_to_none:
            self._filling.show()
        self._zero_optimizer(set_to_none=set_to_none)
        self._drops += 1
        self._begin_step()

    def _begin_step(self) -> None:
        self._filling.begin_step()
        self._done = False

    def _begin_pass(self) -> None:
        """See what has become of gradients and parameters since the last backward pass."""
        if self._changed():
            self._adopt()
        if self._filling.over:  # nobody has called zero_grad: what was not dropped goes on
            self._begin_step()
            return
        dropped, everything = self._filling.dropped()
        if not dropped:
            return
        self._restless = True
        if everything:
            self._give_up()
        elif any(slot.begun for slot in dropped):
            raise UserError(
                "`grad` of some parameters was dropped after their sums over the ranks had begun",
                "drop gradients before a step's first backward pass, or after its last one",
            )
        for slot in dropped:
            slot.filled = False

    def _give_up(self) -> None:
        """Leave a step that has begun. Collective if sums may have begun, on any rank."""
        self._restless = True
        if not self._filling.early:
            return
        # What was begun has to end. That all ranks are here is known only when they have said so.
        with self.group.waiting(self.awaited):
            self.progress.complete(self._told(Place.GIVE_UP))
            self._filling.give_up()
        self._begin_step()

    def weight(self, items: int) -> float:
        """The factor for this rank's loss (see `GradientAverager`). Collective."""
        if self._filling.over:
            self._begin_step()
        self._filling.stirred = True
        return sample_weight(self.group, items)

    def leave_step(self) -> None:
        """Say that this rank is between two steps; another one that averages raises. Collective.

        For a loop whose ranks come together between steps anyway.

        Raises:
            UserError: on all ranks, if some do not come because they average.
        """
        if self.group.size > 1:
            with self.group.waiting("the ranks to leave a step"):
                self.progress.complete(self._told(Place.LEAVE))

    def _told(self, place: Place, facts: Facts | None = None) -> Coroutine[Facts]:
        nothing = np.zeros(len(self.trained), bool)
        return told(self._census, place, self._drops, facts or Facts(nothing))

    def average(self) -> None:
        """Sum what was not summed during the backward pass. Collective."""
        if self._done or self.group.size == 1:
            return
        filling = self._filling
        if changed := self._changed():
            self._adopt()
        late, failure = self._check()
        facts = Facts(
            filling.used(),
            fresh=not filling.over,
            failed=failure is not None,
            late=late,
            changed=changed,
            restless=self._restless or not self.sums.early,
        )
        with self.group.waiting(self.awaited):
            heard = self.progress.complete(self._told(Place.AVERAGE, facts))
            if heard.failed:
                settle(self._census, failure)
            if heard.fresh:
                filling.collect()
                filling.sum_rest()
            if heard.late:
                self._add_late()
        if heard.fresh:
            self._publish(heard.used.tolist())
            filling.learn(restless=heard.restless or heard.late)
        filling.over, filling.stirred = True, False
        self._restless, self._drops = False, 0
        if heard.changed:
            self._include()
        self._done = True

    def _check(self) -> tuple[bool, HpcTrainError | None]:
        return self._filling.check()

    def _add_late(self) -> None:
        """Sum what came too late for its bucket."""
        slots = self._filling.slots
        late = np.array([slot.late is not None for slot in slots], bool)
        heard = self.progress.complete(self._told(Place.AVERAGE, Facts(late)))
        for slot in (slots[number] for number in heard.used.nonzero()[0]):
            more = torch.zeros_like(slot.view) if slot.late is None else slot.late
            self._sum(more)
            slot.view.add_(more)

    def _publish(self, used: Sequence[bool]) -> None:
        for slot, flag in zip(self._filling.slots, used, strict=True):
            slot.publish(used=flag)

    def _changed(self) -> bool:
        """Whether the optimizer has got other parameters, or trains what was frozen."""
        known = self._known == [id(p) for p in parameters_of(self.optimizer)]
        return not known or any(p.requires_grad for p in self._frozen)

    def _new(self) -> list[Parameter]:
        """What the optimizer trains that is not planned for."""
        known = {id(p) for p in self.trained}
        return [p for p in trained_by(self.optimizer) if id(p) not in known]

    def _adopt(self) -> None:
        """Look after parameters that came later."""
        self._filling.adopt(self._new())

    def refresh(self) -> None:
        """Take over parameters that were added or unfrozen; all ranks get rank 0's. Collective.

        `average` finds them by itself, but cannot know which rank has the right ones.

        Raises:
            UserError: the ranks' optimizers have different parameters, or share some by
                `memory.zero`.
        """
        if self.group.size == 1:
            return
        new = self._new()
        added.check_added(self.group, new)
        for parameter in new:
            self._collectives.broadcast_(parameter.data)
        stirred = bool(self.group.largest(int(self._filling.stirred)))
        if stirred:  # a step has begun, which loses nothing
            self._done = False
            self.average()
        self._replan()
        self._filling.over = self._done = stirred

    def _include(self) -> None:
        """Average what new parameters have got in this step. Collective.

        They get buckets after the optimizer's step: somebody may be looking at gradients now.
        """
        strays = self._filling.strays
        new = [slot.parameter for slot in strays]
        added.check_added(self.group, new)
        added.check_added_values(self.group, new)
        there = np.array([slot.filled for slot in strays], bool)
        heard = self.progress.complete(told(self._census, Place.AVERAGE, 0, Facts(there)))
        for slot, used in zip(strays, heard.used.tolist(), strict=True):
            if not slot.filled:
                slot.view.zero_()
            if used:
                self._sum(slot.view)
            slot.publish(used=used)
        self._outdated = True

    def _sum(self, tensor: Tensor) -> None:
        """One sum over the ranks, outside of the buckets. Collective."""
        self._collectives.sum_(torch.view_as_real(tensor) if tensor.is_complex() else tensor)

    def release(self, parameters: Iterable[Parameter]) -> None:
        """Leave parameters that its optimizer has not to another averager. Collective."""
        self._left_to_others |= {id(p) for p in parameters}
        self._replan()

    def _look(self, slot: Slot) -> Tensor:
        """The averaged gradient, for whoever looks at one before `average`."""
        self.average()
        self._looked = True
        return slot.gradient

    def norm(self) -> Tensor:
        """The 2-norm of all averaged gradients, a float64 scalar. Collective."""
        return get_total_norm(self._own()).double()

    def parts(self) -> list[tuple[Parameter, Tensor]]:
        """The averaged gradients that this rank counts. Across `shards`, each is counted once."""
        if self.group.size == 1 and self._changed():
            self._plan()
        everything = [*self.trained, *(slot.parameter for slot in self._filling.strays)]
        return [(p, p.grad) for p in everything if p.grad is not None]

    def scale_(self, factor: float) -> None:
        """Multiply the averaged gradients."""
        if gradients := self._own():
            torch._foreach_mul_(gradients, factor)

    def _own(self) -> list[Tensor]:
        """All averaged gradients that this rank has, in as few tensors as there can be."""
        if self._filling.slots:
            return self._filling.gradients()
        return [part for _, part in self.parts()]

    def step(self) -> None:
        """Take the optimizer's step, after averaging. Collective."""
        self.optimizer.step()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Average before the step; or, with a closure, whenever that has made gradients."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.average()
            return None

        def averaged() -> Any:
            loss = closure()
            self.average()
            return loss if loss is None else self._mean(loss)

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], averaged, *args[2:]), rest

    def _mean(self, loss: Tensor | float) -> Tensor:
        """The ranks' mean: optimizers that search along a line compare it."""
        mean = torch.as_tensor(loss).detach().clone()
        self._collectives.sum_(mean)
        return mean.div_(self.group.size)

    def _after_step(self) -> None:
        """Others may have something new when this rank comes to `average` again."""
        self._done = False
        if self._outdated:
            self._replan()
        if self._looked:  # `p.grad /= 2` has put what stands for the gradient back
            self._looked = False
            self._filling.show()

    def rescale(self, factor: float) -> None:
        """What compression has not sent is in the gradients' unit, which becomes another one."""
        if isinstance(self.sums, LevelSums) and self.sums.compressor is not None:
            self.sums.compressor.scale_(factor)

    def settle(self) -> None:
        """Nothing to do: ranks differ in nothing but what compression has not sent."""

    def close(self) -> None:
        """Give the optimizer and the model back as they were, and all memory. Collective."""
        if self._closed:
            return
        self._closed = True
        filling = self._filling
        if self.group.largest(int(filling.begun > 0 and not filling.over)):
            if filling.over:
                filling.begin_step()
            filling.sum_rest()
        self.optimizer.zero_grad = self._zero_optimizer  # type: ignore[method-assign]
        for hook in self._step_hooks:
            hook.remove()
        for slot in filling.all_slots:
            slot.parameter.grad = None
        self._unplan()
        self.progress.close()
        self._census.close()
        for release in self.at_close:
            release()
