"""Clips gradients and takes the optimizer's steps, but none whose gradients are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpc_train.checkpoint.state import ExtraState
from hpc_train.collectives.coroutines import drive
from hpc_train.config import RunConfig
from hpc_train.gradients import GradientAverager, LossScaler
from hpc_train.gradients.scaling import clip_gradients
from hpc_train.gradients.staging import computed
from hpc_train.gradients.unwaited import UnwaitedClipping
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group
from hpc_train.parallel.gradients import LayoutGradients
from hpc_train.training.finite import check_finite

logger = logging.getLogger(__name__)

STEPS_COMPARED = 20  # steps of a job in which tensor-parallel ranks compare what they computed


def is_unwaited(config: RunConfig, optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the optimizer can clip and skip by itself, so that steps need not wait for the norm.

    The device must have all gradients and the optimizer's state. In float64 a factor of 32 bits
    would be too coarse. Float16 needs each norm for the next loss scale.
    """
    return (
        device.type != "cpu"
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and config.precision.dtype in ("float32", "bfloat16")
        and (config.run.nonfinite == "stop" or config.precision.dtype == "bfloat16")
        and config.parallel.tp * config.parallel.pp == 1
        and config.gradients.average_every == 1
        and config.memory.offload == "none"
        and (config.optimizer.clip_norm > 0 or config.precision.dtype == "bfloat16")
    )


class OptimizerSteps(ExtraState):
    """Takes the steps of a Trainer's optimizer.

    On a GPU the processor need not wait for the gradients' norm in each step: it looks at the norm
    one step later, while the GPU computes. A step whose gradients are not finite is never taken,
    because the GPU looks at the norm, too.

    Args:
        config: the configuration.
        group: all ranks of the job.
        averager, scaler, layout: have the gradients.
        device: computes them.
        unwaited: clips without waiting for the norm, or None.
    """

    def __init__(
        self,
        config: RunConfig,
        group: Group,
        averager: GradientAverager,
        scaler: LossScaler | None,
        layout: LayoutGradients,
        device: torch.device,
        unwaited: UnwaitedClipping | None,
    ) -> None:
        self.config, self.group = config, group
        self.averager, self.scaler, self.layout = averager, scaler, layout
        self.device, self.unwaited = device, unwaited
        self._exact = config.precision.dtype in ("float32", "float64")
        self._to_compare = STEPS_COMPARED if config.parallel.tp > 1 else 0
        self._unseen = 0  # the step whose norm was not looked at yet

    def advance(
        self, step: int, loss: float, *, needed: bool, losses: Sequence[Tensor] = ()
    ) -> float:
        """Clip the averaged gradients, and take a step if they are finite. Collective.

        Args:
            step: its number.
            loss: its mean loss; 0 if it was not computed.
            needed: whether the caller needs the norm.
            losses: of the micro-batches, to compare them in the first steps.

        Returns:
            The 2-norm of the averaged gradients before clipping, NaN if the step was skipped, 0 if
            it was not needed and is not known.

        Raises:
            NotFiniteError: the loss or the norm is not finite, and `run.nonfinite` is "stop"; on
                all ranks. Without `needed` it can be raised by the next step.
            HpcTrainError: the gradients of too many steps in a row were not finite.
            UserError: losses or gradients that should be the same on tensor-parallel ranks differ.
        """
        self.unify()
        with self.group.waiting.phases("optimizer"):
            if self._to_compare:
                self._to_compare -= 1
                with agreed(self.group):
                    self.layout.check_alike(self.averager, losses, exact=self._exact)
            if self.unwaited is not None:
                return self._take_unwaited(self.unwaited, step, loss, needed=needed)
            limit, norm = self.config.optimizer.clip_norm, 0.0
            if limit or needed or self.scaler is not None:
                self.wait()
                norm = clip_gradients(self.averager, limit, self.scaler, self.layout.norm)
            if self.scaler is None:  # it skips steps that are not finite
                check_finite(self.config, self.group, step, loss, norm)
            if self.scaler is None or math.isfinite(norm):
                self.averager.step()
            else:
                self._tell_skipped(step)
        return norm

    def _take_unwaited(
        self, unwaited: UnwaitedClipping, step: int, loss: float, *, needed: bool
    ) -> float:
        unwaited.clip(self.layout.norm(self.averager))
        norm = 0.0
        try:
            if needed or self._has_new(unwaited.optimizer):
                norm = unwaited.norm()
                if not self._may_take(step, loss, norm):
                    return math.nan
            else:
                self._unseen = step
            self.averager.step()
        finally:
            unwaited.end()
        return norm

    def _has_new(self, optimizer: Optimizer) -> bool:
        """Whether a parameter takes its first step, which the device must not skip by itself.

        torch's SGD would then take the momentum from memory that nobody has written.
        """
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if len(optimizer.state) >= len(trained):
            return False
        return any(p.grad is not None and p not in optimizer.state for p in trained)

    def wait(self) -> None:
        """Wait until a GPU has computed the gradients, which is a part of the backward pass.

        Without this call the wait would count for what asks for a result first.
        """
        if self.device.type != "cpu":
            with self.group.waiting.phases("backward"):
                drive(computed([self.device]))

    def unify(self) -> None:
        """Look at the last step's norm, if nobody has yet. Collective.

        Raises:
            HpcTrainError: as `advance`.
        """
        step, self._unseen = self._unseen, 0
        if step:
            assert self.unwaited is not None
            with self.group.waiting.phases("backward"):  # what the device computes meanwhile
                norm = self.unwaited.norm()
            self._may_take(step, 0.0, norm)

    def _may_take(self, step: int, loss: float, norm: float) -> bool:
        """Whether a step may be taken. Collective."""
        if self.scaler is None:
            check_finite(self.config, self.group, step, loss, norm)
            return True
        if self.scaler.adapt(norm):
            return True
        self._tell_skipped(step)
        return False

    def _tell_skipped(self, step: int) -> None:
        assert self.scaler is not None
        logger.warning("step %d skipped: %s", step, self.scaler.describe())
