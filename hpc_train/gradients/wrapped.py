"""Averager for an optimizer that the user has wrapped by hvd.DistributedOptimizer."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import UserError
from hpc_train.gradients.census import Place
from hpc_train.gradients.hooks import replaced_closure
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
    """The averager for a wrapped optimizer. Collective.

    Raises:
        UserError: the optimizer averages over other ranks than the group's, or it cannot do what
            the options ask for.
    """
    fuses = os.environ.get(runtime.THRESHOLD) != "0"
    for name, asked in (
        (f"engine {options.engine}", options.engine in ("mpi", "nccl")),
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
                f"an optimizer that Horovod has wrapped does not work with {name}",
                f"leave it out, or {UNWRAP}",
            )
    if hasattr(optimizer, "_starting_models"):
        raise UserError(
            "an optimizer wrapped with op=hvd.Adasum takes its steps inside of the backward pass",
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
                f"wrap it with the process set of these ranks, or {UNWRAP}",
            )
        _check_known(optimizer, group)
    return WrappedAverager(model, optimizer, group)


def _check_known(optimizer: Any, group: Group) -> None:
    known = optimizer._requires_update  # the parameters that have Horovod's hook
    if group.size > 1 and any(p not in known for p in trained_by(optimizer)):
        raise UserError(
            "the wrapped optimizer trains parameters that it did not have, or that were frozen, "
            "when it was wrapped; Horovod does not average their gradients",
            "wrap it when it has all of them, and make another Loop or averager with it",
        )


class WrappedAverager(BucketAverager):
    """Implements `GradientAverager` by the optimizer's own `synchronize`.

    As usual with Horovod, `grad` holds this rank's own gradient until it is averaged. `loop.clip`
    averages first; other code sees the mean if it calls `optimizer.synchronize()` first. The next
    step does not average again. Horovod's own errors stay: it raises them for more backward passes
    than it was told of, and for gradients that are dropped while it may be summing them.

    Args:
        model: as for `BucketAverager`.
        optimizer: an optimizer for which `is_wrapped` is true, made without op=hvd.Adasum.
        group: the ranks that it averages over.
    """

    def __init__(self, model: nn.Module, optimizer: Any, group: Group) -> None:
        none = CollectiveSums(AloneCollectives(Group(waiting=group.waiting)), [])
        self.wrapped = optimizer
        self._skipping: AbstractContextManager[None] | None = None
        super().__init__(model, optimizer, group, lambda _: ([], none), Progress(polite=True))
        self._synchronize = optimizer.synchronize
        optimizer.synchronize = self.average  # so that the user's call is compared between ranks

    def _plan(self) -> None:
        super()._plan()
        if self.group.size > 1:  # parameters that Horovod does not average are left to the user
            known = self.wrapped._requires_update
            disown(p for p in self.trained if p not in known)
            self.trained = [p for p in self.trained if p in known]

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Replaces Horovod's `zero_grad`, which knows no `set_to_none`.

        Horovod's raises an error if sums may be under way, so it is called then.
        """
        if set_to_none or self.wrapped._handles:
            self._zero_optimizer()
        else:
            Optimizer.zero_grad(self.optimizer, set_to_none=False)
        self._begin_anew()
        self._drops += 1

    def _begin_anew(self) -> None:
        """Let Horovod average again: the averaged gradients are dropped or used."""
        if self._skipping is not None:
            self._skipping.__exit__(None, None, None)
            self._skipping = None
        self._done = self.wrapped._synchronized = False

    def average(self) -> None:
        """Let Horovod average, unless that is done, and not again in `step`. Collective."""
        if self.group.size == 1 or (self._done and not self.wrapped._handles):
            return
        self._begin_anew()  # a step may have been given up by model.zero_grad()
        _check_known(self.wrapped, self.group)
        with self.group.waiting("the sums of the gradients by Horovod"):
            self.progress.complete(self._told(Place.AVERAGE))
            self._synchronize()
        # Horovod's `step` averages unless it is called in this context, which `_begin_anew` leaves.
        self._skipping = self.wrapped.skip_synchronize()
        self._skipping.__enter__()
        self._done, self._drops = True, 0

    def norm(self) -> Tensor:
        """Average, then compute the norm (see `GradientAverager`). Collective."""
        self.average()
        return super().norm()

    def scale_(self, factor: float) -> None:
        """Average, then multiply the gradients (see `GradientAverager`). Collective."""
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

    def _before_other(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Leave gradients of other optimizers to the user: Horovod does not average them."""
        return replaced_closure(args, kwargs, self._averaged)

    def _after_step(self) -> None:
        """Get ready for the next step.

        It is called twice, because torch's hooks run for Horovod's `step` and for the one in it.
        """
        super()._after_step()
        self._begin_anew()

    def close(self) -> None:
        """Leave the optimizer to Horovod alone. Collective."""
        if not self._closed:
            self._begin_anew()
            del self.wrapped.synchronize
        super().close()
