"""Engine mpi: flat buckets, summed over the ranks while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hpc_train.collectives import Collectives
from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import UserError
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.profile import Profile
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.sums import LevelSums, Sums
from hpc_train.gradients.weight import sample_weight
from hpc_train.mpi.group import Group


class MpiAverager:
    """Implements `GradientAverager` with flat buckets.

    The backward pass makes a gradient in memory of its own; a hook moves it into its bucket while
    it is still in the processor's cache, divided by the number of ranks on the way. A bucket is
    thus written once, never zeroed, and its sum over the ranks is the mean. When its last gradient
    has come, its sum begins; buckets go in the same order on all ranks. Until `average`, `grad` of
    the parameters is None. Parameters that had no part in the loss have gradients of zero, on any
    number of ranks.

    Args:
        model: its parameters that require gradients now take part.
        optimizer: steps on those parameters.
        group: the ranks to average over.
        buckets: none for one rank alone, which needs neither buckets nor hooks.
        sums: of these buckets.
        progress: advances the sums.
        backward_passes: passes that make each gradient; 0: unknown, all sums begin in `average`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: Group,
        buckets: Sequence[Bucket],
        sums: Sums,
        progress: Progress,
        backward_passes: int = 1,
    ) -> None:
        self.optimizer, self.group = optimizer, group
        self.buckets, self.sums, self.progress = buckets, sums, progress
        self.share = 1 / group.size
        self.awaited = f"the sums of the gradients over {group.size} ranks"
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self._passes = backward_passes
        self._views: dict[Parameter, Tensor] = {}
        self._home: dict[Parameter, int] = {}
        for number, (bucket, flat) in enumerate(zip(buckets, sums.flats, strict=True)):
            self._views |= bucket.views(flat)
            self._home |= dict.fromkeys(bucket.parameters, number)
        self._counting = True
        self.shards: Collectives = AloneCollectives(Group(waiting=group.waiting))
        """Of the ranks whose `parts` are all gradients together: here each has them all."""
        self.at_close: list[Callable[[], None]] = [sums.close]
        """What to release."""
        self._forget()
        # A user's own zero_grad has to reach the buckets, too: what they hold is not in `grad`.
        self._zero_optimizer = optimizer.zero_grad
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._hooks = [p.register_post_accumulate_grad_hook(self._move) for p in self._views]

    @property
    def profile(self) -> Profile:
        """What averaging has taken."""
        return self.sums.profile

    def zero_grad(self) -> None:
        """Forget the gradients; the buckets are written anew."""
        self._zero_grad()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """In place of the optimizer's: gradients become None, for buckets are never zeroed."""
        if self._begun and not self._averaged:  # a step given up: what was begun has to end
            self.average()
        self._zero_optimizer(set_to_none=True)
        for parameter in self._views:
            parameter.grad = None
        self._forget()

    def _forget(self) -> None:
        self._left = dict.fromkeys(self._views, self._passes)
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._filled: set[Parameter] = set()
        self._begun = 0
        self._averaged = False

    def weight(self, samples: int) -> float:
        """The factor for this rank's loss (see `GradientAverager`). Collective."""
        return sample_weight(self.group, samples)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; they do not count."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def average(self) -> None:
        """Sum what was not summed during the backward pass. Collective."""
        if self._averaged:
            return
        self._fill_up()
        with self.group.waiting(self.awaited):
            for _ in range(self._begun, len(self.buckets)):
                self._begin_next()
            self.progress.finish()
        self._publish()
        for parameter in self.trained:
            if parameter.grad is None and parameter not in self._views:
                parameter.grad = torch.zeros_like(parameter)
        self._averaged = True

    def _fill_up(self) -> None:
        for bucket in self.buckets[self._begun :]:
            for parameter in bucket.parameters:
                if parameter not in self._filled:
                    self._views[parameter].zero_()

    def _publish(self) -> None:
        for parameter, view in self._views.items():
            parameter.grad = view

    def norm(self) -> Tensor:
        """The 2-norm of all averaged gradients, a float64 scalar. Collective."""
        gradients = [gradient for _, gradient in self.parts()]
        return get_total_norm(gradients).double()

    def parts(self) -> list[tuple[Parameter, Tensor]]:
        """The averaged gradients of which this rank speaks for the ranks of `shards`."""
        return [(p, p.grad) for p in self.trained if p.grad is not None]

    def scale_(self, factor: float) -> None:
        """Multiply the averaged gradients."""
        if gradients := self._own():
            torch._foreach_mul_(gradients, factor)

    def _own(self) -> list[Tensor]:
        """All averaged gradients that lie in this rank's memory."""
        return [p.grad for p in self.trained if p.grad is not None]

    def step(self) -> None:
        """Take the optimizer's step, after averaging. Collective."""
        self.average()
        self.optimizer.step()

    def rescale(self, factor: float) -> None:
        """What compression has not sent is in the gradients' unit, which becomes another one."""
        if isinstance(self.sums, LevelSums) and self.sums.compressor is not None:
            self.sums.compressor.scale_(factor)

    def settle(self) -> None:
        """Nothing to do: ranks differ in nothing but what compression has not sent."""

    def close(self) -> None:
        """Remove the hooks and give the buckets' memory back. Collective."""
        self.optimizer.zero_grad = self._zero_optimizer  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        for parameter in self._views:
            parameter.grad = None
        self.progress.close()
        self._views = {}
        for release in self.at_close:
            release()

    def _move(self, parameter: Tensor) -> None:
        """Put a gradient that a backward pass has just made into its bucket."""
        assert isinstance(parameter, Parameter)  # the hook's type in torch is wider
        assert parameter.grad is not None
        self._check(parameter)
        view = self._views[parameter]
        if parameter in self._filled:
            view.add_(parameter.grad, alpha=self.share)
        else:
            torch.mul(parameter.grad, self.share, out=view)
            self._filled.add(parameter)
        parameter.grad = None
        if self._counting:
            self._count(parameter)
        self.progress.advance()

    def _check(self, parameter: Parameter) -> None:
        if self._averaged:
            raise UserError(
                "a backward pass came after `average`, before `zero_grad`",
                "call zero_grad before each step's first backward pass",
            )
        if self._home[parameter] < self._begun:
            raise UserError(
                "a parameter got more gradients than there are backward passes in a step",
                "give average_gradients the number of backward_passes, or make all but the last "
                "inside `with averager.no_sync():`",
            )

    def _count(self, parameter: Parameter) -> None:
        """Begin the sums of buckets that are full now."""
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._missing[self._home[parameter]] -= 1
            while self.sums.early and self._begun < len(self.buckets) and self._is_full():
                self._begin_next()

    def _is_full(self) -> bool:
        return self._missing[self._begun] == 0

    def _begin_next(self) -> None:
        self.progress.start(self.sums.begin(self._begun))
        self._begun += 1
