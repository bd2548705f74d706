"""Refuses torch's GradScaler where it would look at each rank's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from hpc_train.errors import UserError
from hpc_train.gradients.hooks import before_step

SUPPORTS = "_step_supports_amp_scaling"


def refuse_scaler(optimizer: Optimizer) -> Callable[[], None]:
    """Let each step that torch's GradScaler takes raise an error, on all ranks.

    The scaler would leave out the step on the ranks whose own gradients are not finite, and these
    would no longer meet the others. It calls the step on all ranks, and tells it what it has found
    by the attribute `found_inf`, if the optimizer says that it skips steps by itself.

    Args:
        optimizer: the optimizer.

    Returns:
        A function that undoes this.
    """
    ours: Any = vars(optimizer)
    before = ours.get(SUPPORTS)
    ours[SUPPORTS] = True
    hook = before_step(optimizer, _refuse)

    def undo() -> None:
        hook.remove()
        ours.pop(SUPPORTS, None)
        if before is not None:
            ours[SUPPORTS] = before

    return undo


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    if not hasattr(optimizer, "found_inf"):
        return
    for name in ("grad_scale", "found_inf"):  # so that a later step is not taken for the scaler's
        vars(optimizer).pop(name, None)
    raise UserError(
        "torch's GradScaler looks at each rank's own gradients, which differ between ranks with "
        "memory.zero, average_every and reduction adasum",
        "take hpc_train.gradients.LossScaler or a Loop's precision, whose scale all ranks agree on",
    )
