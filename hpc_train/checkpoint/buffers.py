"""The buffers of a model, which all replicas get from rank 0. Each rank keeps its sparse ones."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpc_train.checkpoint.parts import as_bytes
from hpc_train.collectives import Collectives
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

COMPARED = 1 << 20  # elements of each buffer


class Buffers:
    """Gives all replicas the same buffers, but for sparse ones.

    Args:
        model: this rank's part of the model.
        alike: connects the ranks whose buffers should be the same.
        group: all ranks.
    """

    def __init__(self, model: nn.Module, alike: Collectives, group: Group) -> None:
        self.model, self.alike, self.group = model, alike, group
        self._warned = False
        # Running statistics differ on purpose, or are those of all ranks already.
        self._statistics = {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, module in model.named_modules()
            if isinstance(module, _NormBase)
            for name in ("running_mean", "running_var", "num_batches_tracked")
        }

    def unify(self) -> None:
        """Give all replicas rank 0's buffers, but for sparse ones. Collective.

        Rank 0 warns once of a buffer that differed and is no running statistic of torch's layers.
        """
        compared = self.alike.group.size > 1 and not self._warned
        found = ""
        for name, buffer in self.model.named_buffers():
            if buffer.layout is not torch.strided:
                continue
            if not compared or found or name in self._statistics:
                self.alike.broadcast_(buffer)
            elif _changed_by(self.alike.broadcast_, buffer):
                found = name
        if compared and (names := [name for name in self.group.gathered(found) if name]):
            self._warned = True
            if self.group.rank == 0:
                logger.warning(
                    "the buffer %s differs between ranks, and all get rank 0's at a checkpoint or "
                    "an evaluation, which changes the training: update it from means over the "
                    "ranks (docs/how-to/parallel.md)",
                    names[0],
                )


def _changed_by(change: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> bool:
    """Change a tensor in place. Returns whether its first elements have other bits."""

    def some() -> torch.Tensor:  # it may be a view with strides, or stand for conjugate numbers
        first = tensor.detach().flatten()[:COMPARED].resolve_conj().resolve_neg()
        return as_bytes(first.clone(memory_format=torch.contiguous_format))

    before = some()
    change(tensor)
    return not torch.equal(before, some())
