"""Parameters that came after averaging was set up: unfrozen, added to the optimizer, replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import Parameter

from hpc_train.collectives import Collectives
from hpc_train.collectives.steps import run
from hpc_train.gradients.census import Facts, Place, told
from hpc_train.mpi.agreement import same
from hpc_train.mpi.group import Group


def check(group: Group, added: Sequence[Parameter]) -> None:
    """Check that all ranks have added the same. Collective.

    Raises:
        UserError: they have not.
    """
    forms = repr([(tuple(p.shape), str(p.dtype)) for p in added])
    remedy = "change them in the same way on all ranks"
    same(group, "what was added to the optimizer's parameters", forms, remedy)


def check_values(group: Group, added: Sequence[Parameter]) -> None:
    """Check that all ranks have the same numbers in them. Collective.

    Raises:
        UserError: they have not.
    """
    same(
        group,
        "the value of a parameter that was added after averaging was set up",
        "".join(_digest(p) for p in added),
        "call `averager.refresh()` (of a Loop: `loop.averager`) on all ranks right after adding "
        "parameters: all get those of rank 0",
    )


def average_plainly(added: Sequence[Parameter], census: Group, collectives: Collectives) -> None:
    """Average gradients that lie in no bucket. Collective.

    Args:
        added: the parameters, the same on all ranks.
        census: the ranks, on the communicator of `told`.
        collectives: of the same ranks.
    """
    there = np.array([p.grad is not None for p in added], bool)
    heard = run(told(census, Place.AVERAGE, 0, Facts(there)), polite=True)
    for parameter, used in zip(added, heard.used.tolist(), strict=True):
        if used:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grad = grad.detach().to_dense() / census.size
            collectives.sum_(torch.view_as_real(grad) if grad.is_complex() else grad)
            parameter.grad = grad


def _digest(parameter: Parameter) -> str:
    near = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(near.numpy().data, digest_size=16).hexdigest()
