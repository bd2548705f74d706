"""Collectives for a process alone: every result is the argument itself."""

from __future__ import annotations

from torch import Tensor

from hpc_train.collectives.protocol import Done, check_has_dimension
from hpc_train.mpi.group import Group


class AloneCollectives:
    """Implements `Collectives` for a group of one rank."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def sum_(self, tensor: Tensor) -> None:
        """Do nothing: the sum over one rank is the tensor itself."""

    def max_(self, tensor: Tensor) -> None:
        """Do nothing: the maximum over one rank is the tensor itself."""

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Do nothing: there is no other rank."""

    def start_sum_(self, tensor: Tensor) -> Done:
        """The tensor, whose sum is already there."""
        return Done(tensor)

    def start_gather(self, tensor: Tensor, dim: int) -> Done:
        """The tensor, which is all that there is to gather."""
        check_has_dimension(tensor)
        return Done(tensor)

    def start_sum_scatter(self, tensor: Tensor, dim: int) -> Done:
        """The tensor: this rank's part is all of it."""
        check_has_dimension(tensor)
        return Done(tensor)

    @property
    def overlaps(self) -> bool:
        """False: there is no communication to overlap."""
        return False

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
