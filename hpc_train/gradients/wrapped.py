"""An optimizer that the user has wrapped by hvd.DistributedOptimizer: it averages by itself."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import UserError
from hpc_train.gradients.census import Place
from hpc_train.gradients.mpi import BucketAverager
from hpc_train.gradients.ownership import disown, trained_by
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.sums import CollectiveSums
from hpc_train.mpi import runtime
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

if TYPE_CHECKING:
    from hpc_train.gradients.options import AveragingOptions

UNWRAP = "leave hvd.DistributedOptimizer out"


def wrapped_averager(
    model: nn.Module,
    optimizer: Any,
    group: Group,
    options: AveragingOptions,
) -> WrappedAverager:
    """An averager for a wrapped optimizer. Collective.

    Raises:
        UserError: it averages over other ranks, or the options ask for what it does not do.
    """
    fuses = os.environ.get(runtime.THRESHOLD) != "0"
    for name, asked in (
        ("engine mpi", options.engine == "mpi"),
        ("bucket_bytes", options.bucket_bytes is not None),
        ('two_level "on"', options.two_level == "on"),
        ("compression", options.compression != "none"),
        ("average_every", options.average_every > 1),
        ("zero", options.zero > 0),
        ("reduction adasum", options.reduction == "adasum"),
        (f"deterministic without {runtime.THRESHOLD}=0", options.deterministic and fuses),
    ):
        if asked:
            raise UserError(
                f"Horovod averages for an optimizer that it has wrapped: {name} cannot be had",
                f"leave it out, or {UNWRAP}",
            )
    if hasattr(optimizer, "_starting_models"):
        raise UserError(
            "an optimizer that was wrapped with op=hvd.Adasum steps inside of the backward pass",
            f'{UNWRAP}, and give engine="horovod" and reduction="adasum"',
        )
    hvd = runtime.running_horovod()
    if optimizer.op != hvd.Average:
        raise UserError("the wrapped optimizer does not average: its op is not hvd.Average", UNWRAP)
    ranks = sorted(group.gathered(hvd.rank()))
    with agreed(group):
        theirs = optimizer.process_set.ranks
        if ranks != sorted(range(hvd.size()) if theirs is None else theirs):
            raise UserError(
                f"the wrapped optimizer averages over ranks {theirs} of the job, not {ranks}",
                f"wrap it for these, or {UNWRAP}",
            )
        _check_known(optimizer, group)
    return WrappedAverager(model, optimizer, group)


def _check_known(optimizer: Any, group: Group) -> None:
    known = optimizer._requires_update  # parameters that had no hook are in nothing of Horovod's
    if group.size > 1 and any(p not in known for p in trained_by(optimizer)):
        raise UserError(
            "the wrapped optimizer trains parameters that it did not have, or that were frozen, "
            "when it was wrapped; Horovod does not average their gradients",
            "wrap it when it has all of them, and make another Loop or averager with it",
        )


class WrappedAverager(BucketAverager):
    """Implements `GradientAverager` by the optimizer's own `synchronize`.

    Until they are averaged gradients are this rank's own, as Horovod has them: `loop.clip` sees the
    mean, and so does who calls `optimizer.synchronize()` first. A step that follows does not
    average again. What Horovod does to the loop stays: backward passes beyond those that it was
    told of, and gradients dropped while it may be summing them, raise its own errors.

    Args:
        model: as for `BucketAverager`.
        optimizer: for which `is_wrapped`, not with op=hvd.Adasum.
        group: the ranks that it averages over.
    """

    def __init__(self, model: nn.Module, optimizer: Any, group: Group) -> None:
        none = CollectiveSums(AloneCollectives(Group(waiting=group.waiting)), [])
        self.wrapped = optimizer
        self._skipping: AbstractContextManager[None] | None = None
        super().__init__(model, optimizer, group, lambda _: ([], none), Progress(polite=True))
        self._synchronize = optimizer.synchronize
        optimizer.synchronize = self.average  # the user's call tells the other ranks, too

    def _plan(self) -> None:
        super()._plan()
        if self.group.size > 1:  # what Horovod does not average stays the user's
            known = self.wrapped._requires_update
            disown(p for p in self.trained if p not in known)
            self.trained = [p for p in self.trained if p in known]

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """In place of Horovod's, which takes no argument, and raises while it may be summing."""
        if set_to_none or self.wrapped._handles:
            self._zero_optimizer()
        else:
            Optimizer.zero_grad(self.optimizer, set_to_none=False)
        self._begin_anew()
        self._drops += 1

    def _begin_anew(self) -> None:
        """What was averaged is dropped, or used: Horovod averages the next."""
        if self._skipping is not None:
            self._skipping.__exit__(None, None, None)
            self._skipping = None
        self._done = self.wrapped._synchronized = False

    def average(self) -> None:
        """Let Horovod average, unless it has, and keep it from doing so again. Collective."""
        if self.group.size == 1 or (self._done and not self.wrapped._handles):
            return
        self._begin_anew()  # a step may have been given up by model.zero_grad()
        _check_known(self.wrapped, self.group)
        with self.group.waiting("the sums of the gradients by Horovod"):
            self.progress.complete(self._told(Place.AVERAGE))
            self._synchronize()
        self._skipping = self.wrapped.skip_synchronize()
        self._skipping.__enter__()
        self._done, self._drops = True, 0

    def norm(self) -> Tensor:
        """See `GradientAverager`; averages first."""
        self.average()
        return super().norm()

    def scale_(self, factor: float) -> None:
        """See `GradientAverager`; averages first."""
        self.average()
        super().scale_(factor)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise UserError(
                "the step of a wrapped optimizer takes no closure: Horovod averages before it is "
                "called",
                UNWRAP,
            )
        return super()._before_step(optimizer, args, kwargs)

    def _after_step(self) -> None:
        """Called twice: torch's hooks are around Horovod's `step` and around the one in it."""
        super()._after_step()
        self._begin_anew()

    def close(self) -> None:
        """Leave the optimizer to Horovod alone. Collective."""
        if not self._closed:
            self._begin_anew()
            del self.wrapped.synchronize
        super().close()
