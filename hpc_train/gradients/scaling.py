"""Loss scaling and skipped steps, for training in 16-bit numbers.

Many gradients are smaller than float16's smallest number. The loss is therefore multiplied by a
scale before the backward pass, and the gradients are divided by it. The scale shrinks when
gradients overflow and grows after many good steps. Micikevicius et al., "Mixed precision training",
https://arxiv.org/abs/1710.03740. The rule is that of torch.amp.GradScaler, but there every rank
looks at its own gradients. Here all ranks look at the norm of the averaged gradients. It is the
same number on all of them, so they do the same without asking each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import HpcTrainError
from hpc_train.gradients.averager import GradientAverager
from hpc_train.mpi.group import Group

INITIAL_SCALE = 2.0**16
LARGEST_SCALE = 2.0**64  # reached only if gradients are zero; keeps the scale finite
GROWTH, BACKOFF = 2.0, 0.5
GOOD_STEPS = 2000  # the scale grows after this number of good steps in a row
NORM_OFFSET = 1e-6  # as in torch, so that gradients of 0 are clipped by a finite number
MOST_SKIPPED = 100  # after this number in a row no scale would help: an error


def clip_factor(norm: float, limit: float) -> float:
    """The factor for gradients of this norm that makes their norm `limit` at most.

    It is computed as in `torch.nn.utils.clip_grad_norm_`. A limit of 0 disables clipping and gives
    1. With a limit, a norm of NaN gives NaN.
    """
    return min(limit / (norm + NORM_OFFSET), 1.0) if limit else 1.0


def clip_gradients(
    averager: GradientAverager,
    max_norm: float,
    scaler: LossScaler | None = None,
    norm: Callable[[GradientAverager], Tensor] | None = None,
) -> float:
    """Average the gradients, undo their loss scale and clip them by one factor. Collective.

    Args:
        averager: has the gradients. They keep their values if a scaled step has to be skipped.
        max_norm: largest 2-norm that they keep; 0 disables clipping.
        scaler: has scaled the loss. Its scale is adapted to the norm.
        norm: computes the 2-norm of the whole model's gradients, if the ranks of a replica divide
            the model. By default it is the averager's norm.

    Returns:
        The norm before clipping, without the loss scale. With a scaler it is NaN if the gradients
        of any rank are not finite: the step must be skipped.

    Raises:
        HpcTrainError: too many steps in a row had to be skipped; on all ranks.
    """
    averager.average()
    scale = scaler.scale if scaler is not None else 1.0
    found = float(averager.norm() if norm is None else norm(averager)) / scale
    if scaler is None or scaler.adapt(found):
        factor = clip_factor(found, max_norm) / scale
        if factor != 1.0:
            averager.scale_(factor)
    else:
        found = math.nan
    if scaler is not None and scaler.scale != scale:
        averager.rescale(scaler.scale / scale)
    return found


class LossScaler:
    """Scales the loss and skips steps whose gradients are not finite, the same ones on all ranks.

    In a loop of your own, with the forward pass and the loss under `torch.autocast`:

        scaler = LossScaler(torch.float16)        # once
        scaler.scaled(loss).backward()            # in place of loss.backward()
        scaler.step(averager, clip_norm=1.0)      # in place of averager.step()

    `average_gradients` makes the averager. The scaler has state: register it with the
    loop, or give it to `TrainingState`.

    Args:
        dtype: the dtype that autocast computes in. For float16 the scale changes. Bfloat16 has the
            range of float32, so its scale stays 1, but its steps can be skipped, too.
        group: ranks that agree on which steps to skip. It is needed only if gradients are not
            averaged in every step (`average_every` above 1), so that ranks see different norms.
    """

    def __init__(self, dtype: torch.dtype = torch.float16, group: Group | None = None) -> None:
        self.dtype = dtype
        self.group = group or Group()
        self.dynamic = dtype is torch.float16
        self.scale = INITIAL_SCALE if self.dynamic else 1.0
        self.good_steps = 0
        """Good steps since the scale last changed or a step was skipped."""
        self.skipped_steps = 0
        """All steps that were skipped so far."""
        self.skipped_in_a_row = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in 32 bits or more, because float16 could not hold it."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    def step(self, averager: GradientAverager, *, clip_norm: float = 0.0) -> bool:
        """Average, unscale, clip and take the optimizer's step, or skip it. Collective.

        Args:
            averager: has the gradients of a scaled loss.
            clip_norm: largest norm of the gradients; 0 disables clipping.

        Returns:
            Whether the step was taken, the same on all ranks.

        Raises:
            HpcTrainError: too many steps in a row had to be skipped; on all ranks.
        """
        finite = math.isfinite(clip_gradients(averager, clip_norm, self))
        if finite:
            averager.step()
        return finite

    def adapt(self, norm: float) -> bool:
        """Adapt the scale to a step's gradients. Collective if the scaler has a group.

        Args:
            norm: the 2-norm of the whole model's averaged gradients.

        Returns:
            Whether the norm is finite on all ranks. If not, the step must be skipped.

        Raises:
            HpcTrainError: too many steps in a row had to be skipped; on all ranks.
        """
        # With local steps the norms differ between ranks: if one rank skips a step, all do.
        finite = not self.group.largest(int(not math.isfinite(norm)))
        if finite:
            self._count_good()
        else:
            self._skip()
        return finite

    def describe(self) -> str:
        """The reason why a step was skipped, as text for a message."""
        scale = f", the loss scale is now {self.scale:g}" if self.dynamic else ""
        return f"its gradients are not finite ({self.skipped_steps} skipped so far{scale})"

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: plain JSON values, the same on all ranks and layouts."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state.

        If that was of another dtype, only the number of skipped steps is taken over.
        """
        self.skipped_steps = int(state["skipped_steps"])
        if state["dtype"] == self.state_dict()["dtype"]:
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
            self.skipped_in_a_row = int(state["skipped_in_a_row"])

    def _count_good(self) -> None:
        self.skipped_in_a_row = 0
        self.good_steps += 1
        if self.dynamic and self.good_steps == GOOD_STEPS:
            self.good_steps = 0
            self.scale = min(self.scale * GROWTH, LARGEST_SCALE)

    def _skip(self) -> None:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        self.good_steps = 0
        if self.dynamic:
            self.scale *= BACKOFF
        if self.skipped_in_a_row >= MOST_SKIPPED:
            error = HpcTrainError(
                f"the gradients of {MOST_SKIPPED} steps in a row were NaN or infinite",
                "look at the loss and the data, take a lower optimizer.lr, or try "
                "precision.dtype float32",
            )
            error.agreed = True  # the norm, and so the count, is the same on all ranks
            raise error
