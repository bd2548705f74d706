"""Takes the steps of a user's own loop: accumulation, loss scale, clipping."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpc_train.collectives import Collectives
from hpc_train.collectives.regions import check_no_transform, joined
from hpc_train.errors import UserError
from hpc_train.gradients import LossScaler
from hpc_train.gradients.hooks import Closure, replaced_closure
from hpc_train.gradients.scaling import clip_factor, clip_gradients
from hpc_train.job.heartbeat import Heartbeat
from hpc_train.mpi.agreement import same
from hpc_train.mpi.group import Group
from hpc_train.training.delivery import Delivery

logger = logging.getLogger(__name__)


class Stepping(Delivery):
    """Takes the steps of a loop whose batches `Delivery` delivers."""

    scaler: LossScaler | None = None
    """The loss scaler of the loop; None: the loop has no `precision`."""
    collectives: Collectives
    _calls: Group
    """A communicator for what the program calls."""
    _device_type = "cpu"
    _is_scaled = False  # a loss was scaled since the last step
    _may_step = False  # `step` is calling the optimizer's step
    _clipped = False  # in this step; Horovod's optimizer calls its hooks twice

    @contextmanager
    def _unlimited(self) -> Iterator[None]:
        """Disable the time limit of a step in this block: it was measured without evaluations."""
        waiting = self.group.waiting
        limit, waiting.limit = waiting.limit, math.inf
        Heartbeat(self.group).tell(max(0, self._given - 1), 1.5 * self.options.hang_timeout)
        try:
            yield
        finally:
            waiting.limit = limit

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for the forward pass and the loss, in `precision` by `torch.autocast`."""
        if self.scaler is None:
            return nullcontext()
        return torch.autocast(self._device_type, self.scaler.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, times the loss scale and `loss_weight`.

        Args:
            loss: a scalar, the mean over the micro-batch's samples, or over what the option
                `counted` counts.
        """
        if (weight := self.loss_weight) != 1:
            loss = loss * weight
        if self.scaler is not None:
            loss = self.scaler.scaled(loss)
            self._is_scaled = True
        loss.backward()

    @property
    def step_number(self) -> int:
        """The number of the step whose batch was given last, from 1; 0 before the first one.

        It continues after a restart. So a learning rate that depends on it alone need not be saved.
        """
        return self._given

    def step(self) -> bool:
        """Average the gradients and take the optimizer's step. Collective.

        Without `precision` it does the same as `optimizer.step()`.

        Returns:
            Whether the step was taken. With `precision` all ranks skip a step whose gradients are
            not finite, but count it as a step.

        Raises:
            UserError: micro-batches of the step are left, or the loss was not scaled.
            HpcTrainError: the gradients of 100 steps in a row were not finite.
        """
        self._check_open()
        self._check_not_replaced()
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
            self._stepped.add(id(self.optimizer))
            self._taken = self._given
            logger.warning("step %d skipped: %s", self._given, self.scaler.describe())
        return taken

    def _check_scaled(self, scaler: LossScaler) -> None:
        """Refuse float16 gradients of a loss that was not scaled."""
        # With memory.zero the optimizer has parts of parameters, which get theirs later.
        trained = [p for one in self.optimizer.param_groups for p in one["params"]]
        trained += self.checkpoints.state.model.parameters()
        if (
            scaler.dynamic
            and not self._is_scaled
            and any(parameter.grad is not None for parameter in trained)
        ):
            raise UserError(
                "the loop has precision float16, and the loss of this step has no scale",
                "call loop.backward(loss) in place of loss.backward()",
            )

    def _begin_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        """A hook before the optimizer's step. With `precision` only `step` may call that."""
        if self.scaler is not None and not self._may_step:
            raise UserError(
                f"the loop has precision {str(self.scaler.dtype).removeprefix('torch.')}, and "
                "optimizer.step() was called, which does not skip gradients that are not finite",
                "call loop.step()",
            )
        super()._begin_step(optimizer, *arguments)

    def _end_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        """A hook after the optimizer's step."""
        super()._end_step(optimizer, *arguments)
        self._clipped = False

    def _clip_in_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """A hook that clips before the optimizer's step, or after each call of its closure."""
        if not self.options.clip_norm or self.scaler is not None:  # `scaler.step` clips itself
            return None
        if getattr(optimizer, "grad_scale", None) is not None:
            raise UserError(
                "the loop has clip_norm, and GradScaler leaves gradients scaled for this optimizer",
                "call scaler.unscale_(optimizer) before scaler.step(optimizer)",
            )

        def clipped(closure: Closure) -> Closure:
            def called() -> Any:
                loss = closure()
                self.clip(self.options.clip_norm)
                return loss

            return called

        changed = replaced_closure(args, kwargs, clipped)
        if changed is None:
            if not self._clipped:
                self.clip(self.options.clip_norm)
            self._clipped = True
        return changed

    def clip(self, max_norm: float) -> float:
        """Average the gradients, and scale them down if their norm is larger. Collective.

        Returns:
            The 2-norm of all averaged gradients before clipping, without the loss scale.
        """
        self._check_due("loop.clip()")
        if self.scaler is None:
            return clip_gradients(self.averager, max_norm)
        self.averager.average()
        norm = float(self.averager.norm()) / self.scaler.scale  # gradients are still scaled
        if (factor := clip_factor(norm, max_norm)) != 1.0:
            self.averager.scale_(factor)
        return norm

    def gather(self, values: Tensor) -> Tensor:
        """The rows of all ranks, for a loss that compares samples. Collective.

        A contrastive loss of one process (SimCLR, CLIP) compares each sample with the whole batch.
        Gather what it compares, such as features and labels. A rank may compute the whole loss, or
        that of its own samples against all others; the gradients are those of one process either
        way. With `accumulate`, the rows are those of one backward pass. If each rank computes the
        whole loss, a gradient with respect to inputs, as of `torch.autograd.grad`, is that of one
        process times the number of ranks.

        Args:
            values: shape (samples, ...), the same on all ranks. Gradients flow back through it.

        Returns:
            Shape (ranks x samples, ...), in the order of the ranks, as one process has them.

        Raises:
            UserError: shapes or dtypes differ between ranks, `values` has no dimensions, or a
                transform of torch.func calls it.
        """
        self._check_open()
        if self.group.size > 1:
            check_no_transform("loop.gather", "compute gradients by torch.autograd.grad")
        form = f"{list(values.shape)} {values.dtype}"
        with self._watched():
            same(
                self._calls,
                "what loop.gather was given (shape and dtype)",
                form,
                "give all ranks the same number of rows",
            )
            return joined(values, self.collectives)

    def weight(self, items: int) -> float:
        """The factor for a loss that is a mean over `items` items of this rank. Collective.

        Multiply the loss by it if its items are not the samples, but tokens that count, or pixels
        under a mask. Then the mean over the ranks is the mean over all items. A rank without items
        gets 0, and may leave the backward pass out. With `accumulate` the factor is for one
        micro-batch. The option `counted` does this for the whole step, and excludes this method.

        Raises:
            UserError: the loop has the option `micro_tokens` or `counted`.
        """
        if self.options.uneven:
            raise UserError(
                "loop.weight was called, but loop.backward knows what each micro-batch weighs",
                "leave it out; the option `counted` says what a loss is a mean over",
            )
        if not items:  # a rank that leaves its backward pass out has no loss to scale
            self._is_scaled = True
        return self.averager.weight(items)
