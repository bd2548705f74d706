"""Collectives of a process alone: every result is the argument."""

from __future__ import annotations

from torch import Tensor

from hpc_train.collectives.protocol import Done
from hpc_train.mpi.group import Group


class AloneCollectives:
    """Implements `Collectives` for a group of one rank."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def sum_(self, tensor: Tensor) -> None:
        """The sum over one rank is the tensor itself."""

    def max_(self, tensor: Tensor) -> None:
        """So is the largest."""

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """There is nobody to send it to."""

    def start_sum_(self, tensor: Tensor) -> Done:
        """Nothing to wait for."""
        return Done(tensor)

    def start_gather(self, tensor: Tensor, dim: int) -> Done:
        """One rank's tensor is the whole."""
        return Done(tensor)

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Done:
        """Its part is all of it."""
        return Done(tensor)

    @property
    def overlaps(self) -> bool:
        """There is nothing to wait for."""
        return False

    def close(self) -> None:
        """There is nothing to release."""
