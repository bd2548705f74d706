"""Whether what is trained has come to infinite numbers, or to none (NaN)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpc_train.mpi.group import Group


def trained_is_finite(model: nn.Module, alike: Group, group: Group) -> bool:
    """Whether all trained parameters are finite. Collective.

    Only what is trained is looked at: a mask in a buffer may well have infinities. A step that
    makes the optimizer's state infinite makes its parameter so, then or in the next step.

    Args:
        model: this rank's.
        alike: the ranks that hold the same as this one, which share the work.
        group: all ranks of the job.
    """
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    mine = trained[alike.rank :: alike.size]
    return not group.largest(int(not are_finite(mine)), "whether the state is finite")


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers of some tensors are finite, at the cost of reading them once."""
    sums = [t.sum(dtype=_wide(t.dtype)) for t in tensors if t.is_floating_point()]
    sums += [torch.view_as_real(t).sum() for t in tensors if t.is_complex()]
    if all(bool(torch.stack(some).isfinite().all()) for some in _by_kind(sums)):
        return True
    # Finite ones may add up to more. torch does not look at numbers of 8 bits.
    return all(bool(torch.isfinite(t.to(_wide(t.dtype))).all()) for t in tensors)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _by_kind(sums: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for one in sums:
        kinds.setdefault((one.device, one.dtype), []).append(one)
    return list(kinds.values())
