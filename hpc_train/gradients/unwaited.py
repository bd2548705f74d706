"""Clips gradients on a device by a norm that stays there, so that no rank waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpc_train.gradients.scaling import NORM_OFFSET
from hpc_train.gradients.staging import CopyLane, CopyMark


class UnwaitedClipping:
    """Tells an optimizer by tensors on the device how to clip, and whether to take its step.

    The fused optimizers of torch read `grad_scale`, by which they divide gradients, and
    `found_inf`, with which they change nothing if it is 1. `torch.amp.GradScaler` sets the same.

    Args:
        optimizer: a fused optimizer, whose parameters are on the device.
        device: the device.
        limit: largest 2-norm that gradients keep; 0 disables clipping.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, limit: float) -> None:
        assert getattr(optimizer, "_step_supports_amp_scaling", False)
        self.optimizer: Any = optimizer
        self.limit = limit
        self._lane = CopyLane(device)
        self._given = torch.zeros(())
        self._host: Tensor | None = None
        self._mark: CopyMark | None = None

    def clip(self, norm: Tensor) -> None:
        """Let the optimizer's next step clip gradients, and do nothing if they are not finite.

        Args:
            norm: their 2-norm, a float64 scalar on the device.
        """
        if self.limit:
            divisor = ((norm + NORM_OFFSET) / self.limit).clamp(min=1.0)
            self.optimizer.grad_scale = divisor.float()
        self.optimizer.found_inf = norm.isfinite().logical_not().float()
        self._given = norm  # its memory must not be used again while it is copied
        host = self._lane.room(norm)
        self._mark = self._lane.copy(norm, host)
        self._host = host

    def norm(self) -> float:
        """The norm that `clip` was given last. Waits until the device has computed it."""
        assert self._host is not None
        assert self._mark is not None
        self._mark.synchronize()
        return float(self._host)

    def end(self) -> None:
        """Let the optimizer's next step be a usual one."""
        for name in ("grad_scale", "found_inf"):
            vars(self.optimizer).pop(name, None)
