"""Checks of parameters that came after averaging was set up.

They were unfrozen, added to the optimizer, or put in the place of others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch.nn import Parameter

from hpc_train.collectives.overwrite import bits
from hpc_train.mpi.agreement import same
from hpc_train.mpi.group import Group


def check_added(group: Group, added: Sequence[Parameter]) -> None:
    """Check that all ranks have added parameters of the same shapes and dtypes. Collective.

    Raises:
        UserError: the ranks have added different ones.
    """
    forms = repr([(tuple(p.shape), str(p.dtype)) for p in added])
    remedy = "change them in the same way on all ranks"
    same(group, "the list of parameters added to the optimizer", forms, remedy)


def check_added_values(group: Group, added: Sequence[Parameter]) -> None:
    """Check that the added parameters have the same values on all ranks. Collective.

    Raises:
        UserError: a value differs.
    """
    same(
        group,
        "the value of a parameter that was added after averaging was set up",
        "".join(_digest(p) for p in added),
        "call `averager.refresh()` (of a Loop: `loop.averager`) on all ranks right after adding "
        "parameters: it gives all ranks the values of rank 0",
    )


def _digest(parameter: Parameter) -> str:
    near = parameter.detach().cpu().contiguous()
    return hashlib.blake2b(bits(near).numpy().data, digest_size=16).hexdigest()
