"""The mean over samples if ranks have different numbers of samples."""

from __future__ import annotations

from hpc_train.errors import UserError
from hpc_train.mpi.group import Group


def sample_weight(group: Group, samples: int) -> float:
    """The factor for this rank's loss that `GradientAverager.weight` gives. Collective.

    Raises:
        UserError: no rank has a sample.
    """
    total = group.total(samples)
    if not total:
        raise UserError("no rank has a sample for this step", "leave the step out on all ranks")
    return samples * group.size / total
