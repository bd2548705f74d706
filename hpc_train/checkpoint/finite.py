"""Whether what is trained has come to infinite numbers, or to none (NaN)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.checkpoint.parts import Parts
from hpc_train.mpi.group import Group

TOGETHER = 1 << 20  # bytes of small tensors that are looked at as one

Batch: TypeAlias = "tuple[torch.dtype, list[str]]"


def batches(held: Mapping[str, LocalTensor], names: Iterable[str]) -> list[Batch]:
    """Divide tensors of numbers into a few batches of one type and device each."""
    found: list[Batch] = []
    begun: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name in names:
        tensor = held[name].tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        kind = tensor.dtype, tensor.device
        some, size = begun.get(kind, ([], TOGETHER))
        if size + tensor.nbytes > TOGETHER:
            some, size = [], 0
            found.append((tensor.dtype.to_real(), some))
        some.append(name)
        begun[kind] = some, size + tensor.nbytes
    return found


def parts_are_finite(parts: Parts, mine: Iterable[Batch], group: Group) -> bool:
    """Whether the numbers of all ranks' batches are finite. Collective.

    Only what is trained has to be looked at: a mask in a buffer may well have infinities. A step
    that makes the optimizer's state infinite makes its parameter so, then or in the next step.

    Args:
        parts: what this rank holds.
        mine: what of it this rank looks at.
        group: all ranks of the job.
    """
    finite = are_finite([parts.flat(names).view(dtype) for dtype, names in mine])
    return not group.largest(int(not finite), "whether the state is finite")


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
