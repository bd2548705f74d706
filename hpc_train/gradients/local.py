"""Local steps: each replica trains by itself, and every N steps all replicas become their mean.

Local SGD (Stich, "Local SGD converges fast and communicates little", ICLR 2019,
https://arxiv.org/abs/1805.09767). The optimizer's moments are averaged as well as the parameters,
so that all replicas are equal afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives.alone import AloneCollectives
from hpc_train.gradients import added
from hpc_train.gradients.hooks import Closure
from hpc_train.gradients.mpi import BucketAverager, MakeBuckets
from hpc_train.gradients.profile import Profile
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.state import moments, unite_state
from hpc_train.gradients.sums import CollectiveSums
from hpc_train.gradients.torch_scaler import refuse_scaler
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels


class LocalSteps(BucketAverager):
    """Implements `GradientAverager` by averaging parameters every few steps, and no gradients.

    Args:
        model, optimizer: as for `BucketAverager`.
        levels: the ranks.
        every: number of steps from one averaging to the next.
        make: makes buckets of parameters, and their sums.
        progress: advances the sums.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        levels: Levels,
        every: int,
        make: MakeBuckets,
        progress: Progress,
    ) -> None:
        none = CollectiveSums(AloneCollectives(Group(waiting=levels.whole.waiting)), [])
        super().__init__(model, optimizer, levels.whole, lambda _: ([], none), Progress())
        self.every, self._since = every, 0
        self._make_mean, self._mean_progress = make, progress
        self._joined: dict[Parameter, None] = {}  # stepped since the last mean, but not planned
        self._shared, self._mean_sums = make(self.trained)
        self.at_close += [progress.close, lambda: self._mean_sums.close(), refuse_scaler(optimizer)]

    @property
    def profile(self) -> Profile:
        """Time and bytes that averaging has taken so far."""
        return self._mean_sums.profile

    def average(self) -> None:
        """Do nothing: gradients are not averaged."""

    def _averaged(self, closure: Closure) -> Closure:
        """A closure whose loss and gradients stay this rank's own."""

        def called() -> Any:
            drops = self._drops
            loss = closure()
            self._drops = drops  # ranks may call their closures differently often
            return loss

        return called

    def _after_step(self) -> None:
        """Average the replicas after every `every` steps."""
        if self._changed():  # the user may freeze them again before the next mean
            self._joined.update(dict.fromkeys(self._new()))
        self._since += 1
        if self._since == self.every:
            self.settle()

    def settle(self) -> None:
        """Set all replicas to their mean, and count steps from 0 again. Collective.

        Nothing is done if no step was taken since the last time.
        """
        if not self._since:
            return
        try:
            if self.group.largest(int(self._changed() or bool(self._joined))):
                self._replan()
            self._mean()
        finally:  # `close` must not fail once more
            self._since = 0
            self._joined.clear()

    def _retired(self) -> list[Parameter]:
        """Parameters that were unfrozen and frozen again since the last mean."""
        known = {id(p) for p in self.trained}
        return [p for p in self._joined if not p.requires_grad and id(p) not in known]

    def close(self) -> None:
        """Average the steps since the last time, so that all replicas are equal. Collective."""
        if not self._closed:
            self._since = self.group.largest(self._since)  # a step may have failed on some ranks
            self.settle()
        super().close()

    def _replan(self) -> None:
        added.check_added(self.group, [*self._new(), *self._retired()])
        if self.group.largest(self._since):
            self._mean()  # the new plan lacks parameters that were frozen since the last mean
        super()._replan()
        self._mean_sums.close()
        self._shared, self._mean_sums = self._make_mean([*self.trained, *self._retired()])

    def _mean(self) -> None:
        """Set the parameters of the plan, and the optimizer's moments, to their means."""
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.state.clear()  # a history of the rank's own steps, not of the mean's
        with torch.no_grad():
            self._average({p: p.data for bucket in self._shared for p in bucket.parameters})
            # Else ranks would average different moments.
            for factor in unite_state(self.optimizer, self.group):
                self._sum(factor)
                factor.div_(self.group.size)
            for slot in moments(self.optimizer).values():
                self._average(slot)

    def _average(self, tensors: dict[Parameter, Tensor]) -> None:
        sums = self._mean_sums
        views = {
            p: view
            for bucket, flat in zip(self._shared, sums.flats, strict=True)
            for p, view in bucket.views(flat).items()
        }
        for parameter, view in views.items():
            if parameter in tensors:
                view.copy_(tensors[parameter]).div_(self.group.size)
            else:
                view.zero_()
        with self.group.waiting(f"the mean of {self.group.size} replicas"):
            for number in range(len(self._shared)):
                self._mean_progress.start(sums.begin(number))
            self._mean_progress.finish()
        for parameter, view in views.items():
            if parameter in tensors:
                tensors[parameter].copy_(view)
