"""Stops a training whose loss or gradients are not finite, before they spoil the model."""

from __future__ import annotations

import logging
import math

from hpc_train.config import RunConfig
from hpc_train.errors import NotFiniteError
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)


def check_finite(config: RunConfig, group: Group, step: int, loss: float, norm: float) -> None:
    """Stop, or warn, before a step with a loss or a norm that is not finite. Collective.

    Args:
        config: the configuration.
        group: all ranks of the job.
        step: the number of the step.
        loss: its loss; 0 if it was not computed.
        norm: the norm of its gradients; 0 if it was not computed.

    Raises:
        NotFiniteError: the loss or the norm is not finite, and `run.nonfinite` is "stop"; on all
            ranks.
    """
    bad = not math.isfinite(loss + norm)
    if config.gradients.average_every > 1:  # else all ranks have the same numbers
        bad = group.largest(int(bad)) > 0
    if not bad:
        return
    of_loss = f"a loss of {loss} and " if loss else ""
    error = NotFiniteError(
        f"step {step} has {of_loss}gradients with a norm of {norm}",
        "set a smaller optimizer.lr, or optimizer.clip_norm, and start again: the run resumes "
        "from the last checkpoint; run.nonfinite warn only warns and continues",
    )
    if config.run.nonfinite == "warn":
        logger.warning("%s", error.cause)
        return
    error.agreed = True
    raise error
