"""An optimizer that the user has wrapped by hvd.DistributedOptimizer: it averages by itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import UserError
from hpc_train.gradients.census import Place
from hpc_train.gradients.mpi import MpiAverager
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.sums import CollectiveSums
from hpc_train.mpi.group import Group

if TYPE_CHECKING:
    from hpc_train.gradients.averager import Engine
    from hpc_train.gradients.choice import Options

REMEDY = "leave it out, or give the optimizer that was wrapped"


def wrapped_averager(
    model: nn.Module, optimizer: Any, group: Group, engine: Engine, options: Options
) -> WrappedAverager:
    """An averager for a wrapped optimizer. Collective.

    Raises:
        UserError: it averages over other ranks, or the options ask for what it does not do.
    """
    for name, asked in (
        ("engine mpi", engine == "mpi"),
        ("bucket_bytes", options.bucket_bytes is not None),
        ('two_level "on"', options.two_level == "on"),
        ("compression", options.compression != "none"),
        ("average_every", options.every > 1),
        ("zero", options.zero > 0),
    ):
        if asked:
            raise UserError(
                f"Horovod averages for an optimizer that it has wrapped: {name} cannot be had",
                REMEDY,
            )
    if hasattr(optimizer, "_starting_models"):
        raise UserError(
            "an optimizer that was wrapped with op=hvd.Adasum steps inside of the backward pass",
            'give the one that was wrapped, with engine="horovod" and reduction="adasum"',
        )
    ranks = optimizer.process_set.size()
    if ranks != group.size:
        raise UserError(
            f"the wrapped optimizer averages over {ranks} ranks, not {group.size}",
            "wrap it for all ranks, or give the one that was wrapped",
        )
    return WrappedAverager(model, optimizer, group)


class WrappedAverager(MpiAverager):
    """Implements `GradientAverager` by the optimizer's own `synchronize`.

    Until the step, gradients are this rank's own, as Horovod has them: `loop.clip` sees the mean,
    and so does who calls `optimizer.synchronize()` first. A step that follows does not average
    again. What Horovod does to the loop stays: backward passes beyond those that it was told of,
    and gradients dropped between backward pass and step, raise its own errors.

    Args:
        model: as for `MpiAverager`.
        optimizer: for which `is_wrapped`, not with op=hvd.Adasum.
        group: the ranks that it averages over.
    """

    def __init__(self, model: nn.Module, optimizer: Any, group: Group) -> None:
        none = CollectiveSums(AloneCollectives(Group(waiting=group.waiting)), [])
        self._skipping: AbstractContextManager[None] | None = None
        super().__init__(model, optimizer, group, lambda _: ([], none), Progress(polite=True))
        self.wrapped = optimizer

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """In place of Horovod's, which takes no argument."""
        if set_to_none:
            self._zero_optimizer()
        else:
            Optimizer.zero_grad(self.optimizer, set_to_none=False)
        self._drops += 1

    def average(self) -> None:
        """Let Horovod average, unless it has, and keep it from doing so again. Collective."""
        if self._done or self.group.size == 1:
            return
        if self._changed():
            raise UserError(
                "the wrapped optimizer trains parameters that it did not have, or that were "
                "frozen, when it was wrapped; Horovod does not average their gradients",
                "wrap it when it has all of them, and make another Loop or averager with it",
            )
        with self.group.waiting("the sums of the gradients by Horovod"):
            self.progress.complete(self._told(Place.AVERAGE))
            if not self.wrapped._synchronized:  # by the user
                self.wrapped.synchronize()
        self._skipping = self.wrapped.skip_synchronize()
        self._skipping.__enter__()
        self._done, self._drops = True, 0

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise UserError(
                "the step of a wrapped optimizer takes no closure: Horovod averages before it is "
                "called",
                "give an optimizer that is not wrapped",
            )
        return super()._before_step(optimizer, args, kwargs)

    def _after_step(self) -> None:
        """Called twice: torch's hooks are around Horovod's `step` and around the one in it."""
        super()._after_step()
        if self._skipping is not None:
            self._skipping.__exit__(None, None, None)
            self._skipping = None
