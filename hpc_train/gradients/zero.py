"""ZeRO's stages 1 to 3: each rank has the optimizer's state of its parts of the parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import connect
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.gradients.divided_state import divide_state, gather_state, has_room
from hpc_train.gradients.division import Reach
from hpc_train.gradients.filling import CONVERT_BEFORE, Filling
from hpc_train.gradients.mpi import BucketAverager
from hpc_train.gradients.norms import total_norm
from hpc_train.gradients.ownership import disown
from hpc_train.gradients.pooled_filling import PooledFilling
from hpc_train.gradients.pooled_sums import PooledSums
from hpc_train.gradients.shared_parameters import SharedParameters
from hpc_train.gradients.slots import Slot
from hpc_train.gradients.staged_parameters import StagedParameters
from hpc_train.gradients.streamed import StreamedParameters
from hpc_train.gradients.torch_scaler import refuse_scaler
from hpc_train.models.initial import InitialValues

logger = logging.getLogger(__name__)

SHARES = "memory.zero shares parameters between ranks"
MOVED = "the model has moved a parameter"
WHOLE = {"LBFGS", "Adafactor", "Muon"}
"""Optimizers of torch whose update of an element depends on other elements."""


def check_divisible(optimizer: Optimizer) -> None:
    """Check that an optimizer can be divided over ranks. Warns if that is not known.

    Raises:
        UserError: it does not treat each element by itself, or has a state of other shapes.
    """
    for parameter, slots in optimizer.state.items():
        for name, value in slots.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise UserError(
                    f"memory.zero cannot divide {name} of the optimizer's state, which has "
                    "another shape than its parameter",
                    "leave zero out, or take another optimizer",
                )
    if WHOLE & {kind.__name__ for kind in type(optimizer).__mro__}:
        raise UserError(
            f"memory.zero gives each rank rows of the parameters, and {type(optimizer).__name__} "
            "does not treat each element by itself",
            "leave zero out, or take another optimizer",
        )
    known = "torch.optim", "hpc_train.", "horovod."
    if not type(optimizer).__module__.startswith(known):
        logger.warning(
            "memory.zero needs an optimizer that treats each element by itself, and %s is not "
            "known to: leave zero out if it uses norms of layers, as LARS does",
            type(optimizer).__name__,
        )


class ShardedAverager(BucketAverager):
    """`BucketAverager` whose optimizer updates this rank's slabs, in memory that the node shares.

    The optimizer's groups hold the slabs in place of the shared parameters, whose `grad` is not
    used. The optimizer must treat each element by itself, as SGD and Adam do (`check_divisible`).
    A state that it has already is divided, and `close` gives all ranks the whole one. Between
    `average` and the end of `step` nobody may use the parameters.

    Args:
        model, optimizer: as for `BucketAverager`.
        parameters: the shared parameters, which are not moved yet. The parameters of a bucket are
            shared if not every rank needs its whole result.
        hidden: whether gathers between nodes go on during the next forward pass. Then nobody may
            read parameters but the modules that have them, unless `settle` was called.
        values: makes the parameters' initial values; None: the parameters have them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parameters: SharedParameters,
        *,
        hidden: bool = False,
        values: InitialValues | None = None,
    ) -> None:
        self.parameters, self.levels = parameters, parameters.levels
        sums = parameters.sums
        super().__init__(
            model,
            optimizer,
            self.levels.whole,
            lambda _: (sums.buckets, sums),
            parameters.progress,
        )
        job = Reach.JOB in parameters.division.reach
        self.shards = connect(self.levels.whole if job else self.levels.node)
        self._counts_whole = self.shards.group.rank == 0
        self.parameters.move(values)
        self.begins = {slab.parameter: slab.place for slab in self.parameters.slabs.values()}
        self._gradients = self.parameters.gradients()
        self.at_close += [self.parameters.release, refuse_scaler(optimizer)]
        if isinstance(parameters, StreamedParameters):
            parameters.attend(model)
        elif hidden and (job or isinstance(parameters, StagedParameters)):
            self.parameters.hide_gathers(model)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._divide_optimizer()
        self._remember()
        self._warned = False  # that a state is only a part
        self._step_hooks.append(optimizer.register_state_dict_pre_hook(self._warn_of_part))

    def _remember(self) -> None:
        self._taking_part.remember(self.shared)

    def _fill(self) -> Filling:
        share, writer = 1 / self.group.size, self.parameters.writer()
        more = self.progress, share, self._look, self._begin_pass, writer
        if isinstance(self.sums, PooledSums):
            return PooledFilling(self.buckets, self.sums, *more)
        return Filling(self.buckets, self.sums, *more)

    def expect(self, passes: int) -> None:
        """Get ready for steps with a known number of backward passes."""
        if isinstance(self.sums, PooledSums) and passes != self.sums.passes:
            self._gradients = {}
            self.sums.expect(passes)
            self._gradients = self.parameters.gradients()
            self._filling.wait_for_calm()
            self._filling.begin_step()

    @property
    def shared(self) -> Collection[Parameter]:
        """The model's parameters that are shared."""
        return self.parameters.home.keys()

    @property
    def streamed(self) -> Collection[Parameter]:
        """The model's parameters that this rank has only as pieces, unless a stage uses them."""
        there = self.parameters
        return there.divided if isinstance(there, StreamedParameters) else ()

    def forget(self) -> None:
        """Forget copies of parameters, because a checkpoint has others. Collective."""
        self.parameters.forget()

    def _divide_optimizer(self) -> None:
        # An optimizer does nothing with frozen parameters, whose pieces have no state to save.
        pieces = {
            slab.parameter: piece
            for piece, slab in self.parameters.slabs.items()
            if piece.requires_grad
        }
        for group in self.optimizer.param_groups:
            kept = [p if p not in self.shared else pieces.get(p) for p in group["params"]]
            group["params"] = [p for p in kept if p is not None]
        divide_state(self.optimizer, self.parameters.slabs, self.shared)

    def _warn_of_part(self, *_: Any) -> None:
        if not self._warned:
            logger.warning(
                "memory.zero: optimizer.state_dict() has this rank's part of the state only; a "
                "checkpoint of a Loop has all of it, and so has the optimizer after close"
            )
        self._warned = True

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            self._filling.zeros.clear()
        else:
            self._filling.zeros |= {
                slot
                for slot in self._filling.slots
                if slot.parameter in self.shared and slot.has_gradient
            }
        super()._zero_grad(set_to_none)
        for parameter in self.shared:
            parameter.grad = None

    def _publish(self, used: Sequence[bool]) -> None:
        pairs = list(zip(self._filling.slots, used, strict=True))
        for slot, flag in pairs:
            if slot.parameter in self.shared:
                # The promise only shows that there is a gradient: a look at it raises (`_look`).
                slot.parameter.grad, slot.hollow = (slot.pending if flag else None), not flag
            else:
                slot.publish(used=flag)
        there = {slot.parameter for slot, flag in pairs if flag}
        for piece, gradient in self._gradients.items():
            piece.grad = gradient if self.parameters.slabs[piece].parameter in there else None

    def _check(self) -> tuple[bool, HpcTrainError | None]:
        """Check as `BucketAverager` does, and that parameters still lie in shared memory."""
        if self.parameters.moved_away():
            return False, UserError(f"{SHARES}, and {MOVED}", CONVERT_BEFORE)
        if self._changed():
            return False, UserError(
                f"{SHARES}, and {self._change()}",
                "close the loop or averager before that, and make another one, a loop in a "
                "directory of its own",
            )
        return super()._check()

    def _change(self) -> str:
        """What has changed since the optimizer's parameters were remembered, as text."""
        names = {id(p): f"parameter {name}" for name, p in self.model.named_parameters()}
        for parameter in self._taking_part.frozen:
            if parameter.requires_grad:
                return f"{names.get(id(parameter), 'a parameter')} was unfrozen (requires_grad)"
        for parameter in self._taking_part.parameters():
            if id(parameter) not in self._taking_part.known:
                what = names.get(id(parameter), "a parameter outside of the model")
                return f"the optimizer has got {what}"
        return "the optimizer has lost parameters"

    def _adopt(self) -> None:
        """Do nothing: `_check` refuses parameters that came later."""

    def refresh(self) -> None:
        """Refuse parameters that came later.

        Raises:
            UserError: the optimizer's parameters have changed.
        """
        if self._changed():
            raise UserError(
                "memory.zero shares the parameters that were there when it was set up",
                "add parameters before, or leave zero out",
            )

    def release(self, parameters: Iterable[Parameter]) -> None:
        """Leave parameters to another averager. Collective.

        The buckets stay, because the optimizer has this rank's parts of them.

        Args:
            parameters: not those of this averager's own optimizer, so they are not shared.
        """
        self.parameters.wait()
        left = set(parameters)
        disown(left)
        stands = self._filling.leave(left)
        self.trained = [stands.get(p, p) for p in self.trained]

    def _add_late(self) -> None:
        """Sum the gradients that came too late for their buckets. Collective."""
        pieces = {slab.parameter: (piece, slab) for piece, slab in self.parameters.slabs.items()}
        for slot, more in self._late():
            if slot.parameter not in self.shared:
                slot.view.add_(more)
            elif slot.parameter in pieces:
                piece, slab = pieces[slot.parameter]
                self._gradients[piece].add_(slab.rows_of(more))

    def _look(self, slot: Slot) -> Tensor:
        if slot.parameter not in self.shared:
            return super()._look(slot)
        if self.parameters.moved_away():  # converting the model looks at each gradient
            raise UserError(f"{SHARES}, and {MOVED}", CONVERT_BEFORE)
        raise UserError(
            "with memory.zero no rank has the whole gradient of a parameter",
            "clip by a Loop's option clip_norm or its clip(max_norm), by the Trainer's key "
            "optimizer.clip_norm, or by the averager's `norm` and `scale_`; drop gradients by "
            "`optimizer.zero_grad()`",
        )

    def parts(self) -> list[tuple[Parameter, Tensor]]:
        """Average, then give the parts that this rank counts (see `GradientAverager`). Collective.

        Pieces have no gradients before that, and no promises that would average when looked at.
        """
        self.average()
        kept = [p for p in self.trained if p not in self.shared]
        whole = [(p, p.grad) for p in kept if p.grad is not None]
        slabs = self.parameters.slabs.items()
        mine = [(s.parameter, p.grad) for p, s in slabs if p.grad is not None]
        return mine + (whole if self._counts_whole else [])

    def norm(self) -> Tensor:
        """The 2-norm of all averaged gradients, a float64 scalar. Collective."""
        square = total_norm([part for _, part in self.parts()]).square()
        self.shards.sum_(square)
        return square.sqrt()

    def _own(self) -> list[Tensor]:
        self.average()
        kept = [p for p in self.trained if p not in self.shared]
        return [p.grad for p in [*self.parameters.slabs, *kept] if p.grad is not None]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Average before the step, as `BucketAverager` does."""
        self.parameters.take_changes()
        return super()._before_step(optimizer, args, kwargs)

    def _after_step(self) -> None:
        """Bring all ranks the parts that the others have updated."""
        super()._after_step()
        self.parameters.update()

    def settle(self) -> None:
        """Wait until all parameters are the updated ones. Collective."""
        self.parameters.wait()

    def close(self) -> None:
        """Give each rank its own copy of the parameters. Collective.

        The optimizer has all parameters again, with their state if the nodes have memory for that.
        """
        if self._closed:
            return
        self.parameters.wait()
        self._unite_optimizer()
        super().close()

    def _unite_optimizer(self) -> None:
        """Undo `_divide_optimizer`. Collective."""
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=False):
            group["params"] = parameters  # groups that came later, an error, stay as they are
        self._gradients = {}
        mine = self.optimizer, self.parameters.slabs
        nbytes = sum(p.nbytes for p in self.shared)
        staged = isinstance(self.parameters, StagedParameters)
        if has_room(*mine, nbytes, self.shards, self.levels, staged=staged):
            gather_state(*mine, self.shared, self.shards)
        for piece in self.parameters.slabs:
            self.optimizer.state.pop(piece, None)
            piece.grad = None  # it lies in the memory of the sums
