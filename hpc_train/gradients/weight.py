"""The mean over samples if ranks have different numbers of samples."""

from __future__ import annotations

import operator

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
        failure = UserError(f"weight was called with {samples!r}", "give a whole number of items")
    failed, total = group.totals([int(failure is not None), mine])
    if failed:
        settle(group, failure)
    if total <= 0:
        raise UserError("no rank has a sample for this step", "leave the step out on all ranks")
    return mine * group.size / total
