"""The mean over the ranks' samples: the weight of a rank's loss, and the mean of the losses."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from hpc_train.collectives import Collectives
from hpc_train.errors import UserError
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group


def sample_weight(group: Group, samples: int) -> float:
    """The factor for this rank's loss that `GradientAverager.weight` gives. Collective.

    Raises:
        UserError: no rank has a sample, or a rank has given no whole number; on all ranks.
    """
    failure, mine = None, 0
    try:
        mine = operator.index(samples)
    except TypeError:
        failure = UserError(
            f"weight was called with {samples!r}",
            "give a whole number of items, or give a weighted loss the rows of loop.gather",
        )
    failed, total = group.totals([int(failure is not None), mine])
    if failed:
        settle(group, failure)
    if total <= 0:
        raise UserError("no rank has a sample for this step", "leave the step out on all ranks")
    return mine * group.size / total


def mean_loss(collectives: Collectives, loss: Tensor | float) -> Tensor | float:
    """The mean of the ranks' losses, for optimizers with a line search. Collective.

    It is computed in float64, because a line search compares losses that hardly differ.

    Returns:
        A number for a number, and a tensor for a tensor, of the same dtype unless that is integer.
    """
    mean = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
    collectives.sum_(mean)
    mean /= collectives.group.size
    if not isinstance(loss, Tensor):
        return mean.item()
    return mean.to(loss.dtype) if loss.dtype.is_floating_point else mean
