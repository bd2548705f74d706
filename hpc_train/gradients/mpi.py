"""Engine mpi: gradients in flat buckets, summed over the ranks during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import Collectives, connect
from hpc_train.collectives.alone import AloneCollectives
from hpc_train.collectives.coroutines import Coroutine
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.gradients import added
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.census import Facts, Place, told
from hpc_train.gradients.filling import Filling
from hpc_train.gradients.hooks import Closure, after_step, before_step, replaced_closure
from hpc_train.gradients.norms import total_norm
from hpc_train.gradients.ownership import claim, disown, parameters_of, refuse_closed
from hpc_train.gradients.profile import Profile
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.residuals import carry_residuals
from hpc_train.gradients.slots import Slot
from hpc_train.gradients.staged_sums import in_host_memory
from hpc_train.gradients.staging import computed
from hpc_train.gradients.sums import LevelSums, Sums
from hpc_train.gradients.weight import mean_loss, sample_weight
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

MakeBuckets = Callable[[Sequence[Parameter]], tuple[Sequence[Bucket], Sums]]
"""Puts parameters into buckets and makes the sums of these buckets. Collective."""


class BucketAverager:
    """Implements `GradientAverager` with flat buckets.

    The backward pass makes a gradient in memory of its own. A hook divides it by the number of
    ranks and moves it into its bucket while it is still in the processor's cache. So a bucket is
    written once and never zeroed, and its sum over the ranks is the mean.

    The user does not say how many gradients a parameter gets in a step: the averager learns it.
    After two steps with the same numbers, a bucket's sum begins as soon as its parameters have got
    these numbers. A gradient that comes later is summed by itself in `average`. The sums of buckets
    begin in the same order on all ranks.

    `grad` of a parameter means the same as in one process. It is None if the gradient was dropped
    or there was none. After a backward pass it stands for the mean (`PendingGradient`). A further
    backward pass adds to a gradient that was not dropped.

    Collective to make.

    Args:
        model: its parameters that require gradients take part, unless another averager has them.
        optimizer: its parameters take part; they need not be the model's.
        group: the ranks to average over.
        make: makes buckets and sums. For a rank alone, which needs neither, it returns no buckets.
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
        self.begins: Mapping[Parameter, int] = {}
        """Where `parts` begin in their parameters, as for `GradientAverager`."""
        self.at_close: list[Callable[[], None]] = []
        """Functions that `close` calls at its end."""
        self._make = make
        self._census = group.duplicate()
        self._collectives = connect(group)
        self._restless = False  # something unusual has happened since the last average
        self._looked = False  # somebody has looked at a gradient before `average`
        self._drops = 0  # how often gradients were dropped since the last average
        self._closed = False
        self._taking_part = added.TakingPart(model, optimizer)
        self._plan()
        # So that a step begins here as well when the user calls the optimizer's zero_grad.
        self._zero_optimizer = optimizer.zero_grad
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._step_hooks = [
            before_step(optimizer, self._before_step),
            after_step(optimizer, lambda *_: self._after_step()),
        ]

    def _plan(self) -> None:
        """Put the parameters that are trained now into buckets. Collective."""
        self.trained = self._taking_part.now()
        self._devices = {p.device for p in self.trained if p.device.type != "cpu"}
        self.buckets, self.sums = self._make(self.trained)
        self._filling = self._fill()
        self._done = False  # whether all gradients are averaged, so that `average` does nothing
        self._outdated = False  # whether parameters have come or gone
        claim(self.trained, self)
        self._remember()

    def _fill(self) -> Filling:
        """Make the slots and hooks that fill the buckets."""
        share = 1 / self.group.size
        return Filling(self.buckets, self.sums, self.progress, share, self._look, self._begin_pass)

    def _remember(self) -> None:
        """Remember the optimizers' parameters, so that `_changed` sees others."""
        self._taking_part.remember()

    def _unplan(self) -> None:
        """Undo `_plan`; gradients that lie in buckets are copied. Collective."""
        disown(self.trained)
        self._filling.release()

    def _replan(self) -> None:
        added.check_trained(self.group, self._taking_part.now())
        before = in_host_memory(self.sums)
        self._unplan()
        self._plan()
        after = in_host_memory(self.sums)
        if isinstance(before, LevelSums) and isinstance(after, LevelSums):
            carry_residuals(before, after)

    @property
    def profile(self) -> Profile:
        """Time and bytes that averaging has taken so far."""
        return self.sums.profile

    def zero_grad(self) -> None:
        """Forget the gradients, also of parameters that the optimizer does not have."""
        self.optimizer.zero_grad()
        for parameter in self.trained:
            parameter.grad = None

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Replaces the optimizer's `zero_grad`."""
        if self._filling.stirred:
            self._give_up()
        if not set_to_none:
            self._filling.show()  # to zero a promise would average first
        self._zero_optimizer(set_to_none=set_to_none)
        self._drops += 1
        self._begin_step()

    def _begin_step(self) -> None:
        self._filling.begin_step()
        self._done = False

    def _begin_pass(self) -> None:
        """Find out what the user has done to gradients and parameters since the last pass."""
        if self._changed():
            self._adopt()
        if self._filling.over:  # nobody has called zero_grad: this pass adds to the old gradients
            self._begin_step()
            return
        dropped, everything = self._filling.dropped()
        if not dropped:
            return
        self._restless = True
        if everything:
            self._give_up()
        elif any(slot.in_sum for slot in dropped):
            raise UserError(
                "`grad` of some parameters was dropped after their sums over the ranks had begun",
                "drop all of them by zero_grad, or some after averaging and before the next pass",
            )
        for slot in dropped:
            slot.part(averaged=False)
            slot.filled = False

    def _give_up(self) -> None:
        """Leave a step that has begun. Collective if sums may have begun on any rank."""
        self._restless = True
        if not self._filling.early:
            return
        # Sums that have begun must end on all ranks: check first that all ranks give up this step.
        with self.group.waiting(self.awaited):
            self.progress.complete(self._told(Place.GIVE_UP))
            self._filling.give_up()
        self._begin_step()

    def weight(self, items: int) -> float:
        """The factor for this rank's loss (see `GradientAverager`). Collective."""
        if self._filling.over:
            self._begin_step()
        self._filling.stirred = True
        if not items:  # then this rank makes no backward pass
            self._filling.promise()
        return sample_weight(self.group, items)

    def leave_step(self, *, gone: bool = False) -> bool:
        """Tell the others that this rank is between two steps (see `GradientAverager`). Collective.

        Raises:
            UserError: some ranks average instead; all ranks raise it.
        """
        if self.group.size == 1:
            return gone
        awaited = "the other ranks, after it left its loop" if gone else "the ranks to leave a step"
        with self.group.waiting(awaited):
            return self.progress.complete(self._told(Place.LEAVE, gone=gone)).gone

    def _told(
        self, place: Place, facts: Facts | None = None, *, gone: bool = False
    ) -> Coroutine[Facts]:
        nothing = np.zeros(len(self.trained), bool)
        return told(self._census, place, self._drops, facts or Facts(nothing, gone=gone))

    def average(self) -> None:
        """Sum the buckets that were not summed during the backward pass. Collective."""
        if self._done or (self.group.size == 1 and not self.buckets):
            return
        filling = self._filling
        if changed := self._changed():
            self._adopt()
        late, failure = self._check()
        facts = Facts(
            filling.used(),
            fresh=not filling.over or filling.renewed(),
            failed=failure is not None,
            late=late,
            changed=changed,
            restless=self._restless or not self.sums.early,
        )
        with self.group.waiting(self.awaited):
            heard = self.progress.complete(self._told(Place.AVERAGE, facts))
            if heard.failed:
                settle(self._census, failure)
            # Equal gradients stay as they are: their sum over the ranks would be rounded.
            fresh = heard.fresh or filling.differ(self._census)
        if self._devices:  # otherwise the time in which they compute would count as communication
            with self.group.waiting.phases("backward"):
                self.progress.complete(computed(self._devices))
        with self.group.waiting(self.awaited):
            if fresh:
                filling.collect()
                filling.sum_rest()
            if heard.late:
                self._add_late()
        if fresh:
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
        """Sum the gradients that came too late for their buckets. Collective."""
        for slot, more in self._late():
            slot.view.add_(more)

    def _late(self) -> Iterator[tuple[Slot, Tensor]]:
        """The sums of the gradients that came too late for their buckets. Collective."""
        slots = self._filling.slots
        late = np.array([slot.late is not None for slot in slots], bool)
        heard = self.progress.complete(self._told(Place.AVERAGE, Facts(late)))
        for slot in (slots[number] for number in heard.used.nonzero()[0]):
            more = torch.zeros_like(slot.view) if slot.late is None else slot.late
            self._sum(more)
            yield slot, more

    def _publish(self, used: Sequence[bool]) -> None:
        for slot, flag in zip(self._filling.slots, used, strict=True):
            slot.publish(used=flag)

    def _changed(self) -> bool:
        """Whether optimizers have other parameters than before, or train one that was frozen."""
        return self._taking_part.changed()

    def _new(self) -> list[Parameter]:
        """Parameters to average that are in no bucket."""
        known = {id(p) for p in self.trained}
        return [p for p in self._taking_part.now() if id(p) not in known]

    def _adopt(self) -> None:
        """Take over parameters that came later."""
        self._filling.adopt(self._new())

    def expect(self, passes: int) -> None:
        """Forget how many backward passes a step had: the averager learns it by itself."""
        self._filling.wait_for_calm()

    def refresh(self) -> None:
        """Average parameters that were added or unfrozen, too, with rank 0's values. Collective.

        `average` finds such parameters by itself, but cannot know which rank has the right values.

        Raises:
            UserError: the ranks' optimizers have different parameters, or ranks share parameters by
                `memory.zero`.
        """
        if self.group.size == 1:
            return
        new = self._new()
        added.check_added(self.group, new)
        for parameter in new:
            self._collectives.broadcast_(parameter.data)
        stirred = bool(self.group.largest(int(self._filling.stirred)))
        if stirred:  # a step has begun: average its gradients, so that none is lost
            self._done = False
            self.average()
        self._replan()
        self._filling.over = self._done = stirred

    def _include(self) -> None:
        """Average the gradients that new parameters have got in this step. Collective."""
        strays = self._filling.strays
        new = [slot.parameter for slot in strays]
        added.check_alike(self.group, new)
        there = np.array([slot.filled for slot in strays], bool)
        with self.group.waiting(self.awaited):
            heard = self.progress.complete(told(self._census, Place.AVERAGE, 0, Facts(there)))
        for slot, used in zip(strays, heard.used.tolist(), strict=True):
            if not slot.filled:
                slot.view.zero_()
            if used:
                self._sum(slot.view)
            slot.publish(used=used)
        # They get buckets after the optimizer's step, because somebody may look at gradients now.
        self._outdated = True

    def _sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks, without a bucket. Collective."""
        self._collectives.sum_(torch.view_as_real(tensor) if tensor.is_complex() else tensor)

    def release(self, parameters: Iterable[Parameter]) -> None:
        """Leave parameters to another averager. Collective.

        Args:
            parameters: not those of this averager's own optimizer.
        """
        self._taking_part.left |= {id(p) for p in parameters}
        self._replan()

    def _look(self, slot: Slot) -> Tensor:
        """Average because somebody looks at a gradient; returns the averaged one. Collective."""
        self.average()
        self._looked = True
        assert slot.gradient is not None  # else `ShardedAverager` raises
        return torch.zeros_like(slot.gradient) if slot.hollow else slot.gradient

    def norm(self) -> Tensor:
        """The 2-norm of all averaged gradients, a float64 scalar. Collective."""
        # A rank alone keeps sparse gradients, and torch computes no norm of a sparse tensor.
        own = [g.coalesce().values() if g.is_sparse else g for g in self._own()]
        return total_norm(own)

    def parts(self) -> list[tuple[Parameter, Tensor]]:
        """The averaged gradients that this rank counts. Across `shards`, each is counted once."""
        if self.group.size == 1 and self._changed():
            self._plan()
        everything = [*self.trained, *(slot.parameter for slot in self._filling.strays)]
        return [(p, p.grad) for p in everything if p.grad is not None]

    def scale_(self, factor: float) -> None:
        """Multiply the averaged gradients. Collective."""
        if gradients := self._own():
            torch._foreach_mul_(gradients, factor)

    def _own(self) -> list[Tensor]:
        """All averaged gradients that this rank has, in as few tensors as possible."""
        if self._filling.slots:
            return self._filling.gradients()
        return [part for _, part in self.parts()]

    def step(self) -> None:
        """Take the optimizer's step, after averaging. Collective."""
        self.optimizer.step()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Average before the step; if the step has a closure, after each call of the closure."""
        changed = replaced_closure(args, kwargs, self._averaged)
        if changed is None:
            self.average()
        return changed

    def follow(self, optimizer: Optimizer) -> None:
        """Average before the steps of another optimizer, too (see `GradientAverager`)."""
        self._taking_part.optimizers.append(optimizer)
        if not {*self._new()} & {*parameters_of(optimizer)}:  # else the next average finds them
            self._remember()
        self._step_hooks.append(before_step(optimizer, self._before_other))

    def _before_other(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Average before a step of an optimizer that is followed, unless that is done.

        Before the step lists the parameters with a gradient: those that no rank has used have none.
        """
        changed = replaced_closure(args, kwargs, self._averaged)
        if changed is None and (not self._filling.over or self._changed()):
            self.average()
        return changed

    def _averaged(self, closure: Closure) -> Closure:
        """A closure after which gradients are averaged, and which returns the mean loss."""

        def averaged() -> Any:
            loss = closure()
            self.average()
            return loss if loss is None else mean_loss(self._collectives, loss)

        return averaged

    def _after_step(self) -> None:
        """Get ready for the next step."""
        self._done = False  # even if this rank has no new gradients, others may have some
        if self._outdated:
            self._replan()
        if self._looked:  # `p.grad /= 2` has put the promise back into `grad`
            self._looked = False
            self._filling.show()

    def rescale(self, factor: float) -> None:
        """Multiply the residuals of compression, which are in units of the old loss scale."""
        sums = in_host_memory(self.sums)
        if isinstance(sums, LevelSums) and sums.compressor is not None:
            sums.compressor.scale_(factor)

    def settle(self) -> None:
        """Do nothing: all ranks have the same parameters and optimizer state."""

    def close(self) -> None:
        """Undo all changes to the optimizer and the model, and release memory. Collective."""
        if self._closed:
            return
        self._closed = True
        filling = self._filling
        # Sums that have begun on some ranks can end only if all ranks take part in them.
        sums = int(filling.begun > 0 and not filling.over)
        if self.group.largest(sums, "the end of averaging (close)"):
            if filling.over:
                filling.begin_step()
            filling.sum_rest()
        self.optimizer.zero_grad = self._zero_optimizer  # type: ignore[method-assign]
        for hook in self._step_hooks:
            hook.remove()
        filling.drop()
        self._unplan()
        self.progress.close()
        self._census.close()
        for release in self.at_close:
            release()
        for name in ("average", "norm", "scale_", "step", "weight", "parts", "refresh"):
            setattr(self, name, refuse_closed)
