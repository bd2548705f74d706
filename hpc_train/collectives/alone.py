"""Collectives of a process alone: every result is the argument."""

from __future__ import annotations

from torch import Tensor

from hpc_train.mpi.group import Group


class AloneCollectives:
    """Implements `Collectives` for a group of one rank."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def sum_(self, tensor: Tensor) -> None:
        """The sum over one rank is the tensor itself."""

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """There is nobody to send it to."""
