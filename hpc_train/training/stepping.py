"""How a loop of the user's own takes its steps: accumulation, loss scale, clipping."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from hpc_train.errors import UserError
from hpc_train.gradients import LossScaler
from hpc_train.gradients.scaling import clip_factor, clip_gradients
from hpc_train.training.delivery import Delivery

logger = logging.getLogger(__name__)


class Stepping(Delivery):
    """Takes the steps of a loop."""

    scaler: LossScaler | None = None
    """Of the loop's precision; None: it has none."""
    _device_type = "cpu"
    _is_scaled = False  # a loss has got the scale since the last step
    _may_step = False  # `step` calls the optimizer
    _clipped = False  # in this step: a wrapped optimizer has its hooks called twice

    def autocast(self) -> AbstractContextManager[Any]:
        """Where the forward pass and the loss are computed in `precision`, by `torch.autocast`."""
        if self.scaler is None:
            return nullcontext()
        return torch.autocast(self._device_type, self.scaler.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a loss, with its scale and its share of the step's micro-batches.

        Args:
            loss: a scalar, the mean over the micro-batch's samples.
        """
        if self.accumulate > 1:
            loss = loss / self.accumulate
        if self.scaler is not None:
            loss = self.scaler.scaled(loss)
            self._is_scaled = True
        loss.backward()

    def step(self) -> bool:
        """Average the gradients and take the optimizer's step, as it does itself. Collective.

        Returns:
            Whether it was taken. With `precision` a step whose gradients are not finite is not, on
            any rank; it counts as one all the same.

        Raises:
            UserError: micro-batches of the step are left; or the backward pass had no loss scale.
            HpcTrainError: the gradients of 100 steps in a row were not finite.
        """
        self._check_open()
        self._settle()
        self._check_due("loop.step()")
        if self.scaler is None:
            self.averager.step()
            return True
        self._check_scaled(self.scaler)
        self._may_step = True
        try:
            taken = self.scaler.step(self.averager, clip_norm=self.options.clip_norm)
        finally:
            self._may_step = self._is_scaled = False
        if not taken:
            self._taken = self._given
            logger.warning("step %d skipped: %s", self._given, self.scaler.describe())
        return taken

    def _check_scaled(self, scaler: LossScaler) -> None:
        """A rank without samples has neither: it leaves its backward pass out."""
        groups = self.optimizer.param_groups
        if (
            scaler.dynamic
            and not self._is_scaled
            and any(p.grad is not None for one in groups for p in one["params"])
        ):
            raise UserError(
                "the loop has precision float16, and the loss of this step has no scale",
                "call loop.backward(loss) in place of loss.backward()",
            )

    def _begin_step(self, *arguments: Any) -> None:
        if self.scaler is not None and not self._may_step:
            raise UserError(
                f"the loop has precision {str(self.scaler.dtype).removeprefix('torch.')}, and "
                "optimizer.step() was called, which leaves out no step that is not finite",
                "call loop.step()",
            )
        super()._begin_step(*arguments)

    def _end_step(self, *arguments: Any) -> None:
        super()._end_step(*arguments)
        self._clipped = False

    def _clip_in_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Clip before the step; or, with a closure, whenever that has made gradients."""
        if not self.options.clip_norm or self.scaler is not None:  # which clips with its own factor
            return None
        if getattr(optimizer, "grad_scale", None) is not None:
            raise UserError(
                "the loop has clip_norm, and GradScaler leaves gradients scaled for this optimizer",
                "call scaler.unscale_(optimizer) before scaler.step(optimizer)",
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if not self._clipped:
                self.clip(self.options.clip_norm)
            self._clipped = True
            return None

        def clipped() -> Any:
            loss = closure()
            self.clip(self.options.clip_norm)
            return loss

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], clipped, *args[2:]), rest

    def clip(self, max_norm: float) -> float:
        """Average the gradients, and scale them down where their norm is larger. Collective.

        Returns:
            The 2-norm of all averaged gradients before, without the loss scale.
        """
        self._check_due("loop.clip()")
        if self.scaler is None:
            return clip_gradients(self.averager, max_norm)
        self.averager.average()
        norm = float(self.averager.norm()) / self.scaler.scale  # which stays until the step
        if (factor := clip_factor(norm, max_norm)) != 1.0:
            self.averager.scale_(factor)
        return norm

    def weight(self, items: int) -> float:
        """The factor for a loss that is a mean over `items` items of this rank. Collective.

        For losses whose items are not the samples: tokens that count, pixels under a mask. With it
        the mean over the ranks is one over all items. A rank without any gets 0, and may leave the
        backward pass out. With `accumulate` it is that of one micro-batch.
        """
        return self.averager.weight(items)
