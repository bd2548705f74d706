"""Parameters on a device, with a copy in the node's memory where the optimizer's step is taken.

The module `staging` explains why the step is taken there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.errors import UserError, plural, size_text
from hpc_train.gradients.buckets import has_slabs
from hpc_train.gradients.division import BucketParts, Reach
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.shared_parameters import SharedParameters
from hpc_train.gradients.slots import GradientWriter
from hpc_train.gradients.staging import CopyLane, CopyMark, PinnedMemory, StagedWriter
from hpc_train.gradients.sums import LevelSums
from hpc_train.models.initial import InitialValues
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)


class StagedParameters(SharedParameters):
    """`SharedParameters` whose model computes with copies on a device. Collective to make.

    After a step, each bucket is copied to the device. The device begins the next forward pass
    meanwhile, if gathers are hidden: a module's work waits for the module's own buckets.

    Others may write to the model's parameters between two steps, in the same way on all ranks. The
    next step begins from what they have written, unless they write to `.data`.

    Args:
        sums, division, progress: as for `SharedParameters`.
        device: the device of the parameters.
    """

    def __init__(
        self, sums: LevelSums, division: BucketParts, progress: Progress, device: torch.device
    ) -> None:
        super().__init__(sums, division, progress)
        self.lane = CopyLane(device)
        self._near: list[Tensor] = []  # the buckets on the device
        self._brought = [0] * len(self.buckets)  # the step whose parameters the device gets
        self._marks: list[CopyMark | None] = [None] * len(self.buckets)
        """For each bucket, the mark of a copy for which the device does not wait yet; or None."""
        self._versions: dict[Parameter, int] = {}
        self._pinned: PinnedMemory | None = None

    def writer(self) -> GradientWriter:
        """Writes gradients to the node's memory, and lets the sums wait for them."""
        divided = sum(each is not Reach.RANK for each in self.sums.division.reach)
        made = StagedWriter(self.lane, divided, self.sums.flats)
        self.sums.filling = made.ended
        return made

    def move(self, values: InitialValues | None = None) -> None:
        """Move the parameters to the shared memory, and copy them to the device. Collective.

        Args:
            values: makes their initial values; None: the parameters have them.
        """
        super().move(values)
        self._pinned = PinnedMemory(self.lane.device, self._flats)
        self.bring_all()

    def _in_use(self, index: int) -> Tensor:
        bucket = self.buckets[index]
        for parameter in bucket.parameters:  # their values are on the host: free the memory first
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
        self._near.append(torch.empty_like(self._flats[index], device=bucket.device))
        return self._near[index]

    def bring_all(self) -> None:
        """Copy all parameters to the device."""
        for index in reversed(range(len(self.buckets))):
            self._bring(index)
        self._follow(range(len(self.buckets)))

    def _bring(self, index: int) -> None:
        self._marks[index] = self.lane.copy(self._flats[index], self._near[index])
        self._brought[index] = self._round

    def _follow(self, indices: Sequence[int]) -> None:
        for index in indices:
            if (mark := self._marks[index]) is not None:
                self.lane.follow(mark)
                self._marks[index] = None

    def _before_module(self, needed: Sequence[int], *_: Any) -> None:
        if any(self._brought[n] < self._round or self._marks[n] is not None for n in needed):
            self.wait(needed)

    def wait(self, needed: Sequence[int] = ()) -> None:
        """Let the device's work wait until parameters are the updated ones (see the base class)."""
        super().wait(needed)
        for index in reversed(range(len(self.buckets))):  # in the order of the forward pass
            if self._brought[index] < self._round == self._gathered[index]:
                self._bring(index)
        self._follow(needed or range(len(self.buckets)))

    def take_changes(self) -> None:
        """Copy what others have written to parameters since the last step to the node's memory."""
        changed = {p for p in self.home if self._versions.get(p) != p._version}
        if not changed:
            return
        with torch.no_grad():
            for piece, slab in self.slabs.items():
                if slab.parameter in changed:
                    piece.copy_(slab.rows_of(slab.parameter))
        self._versions = {p: p._version for p in self.home}

    def forget(self) -> None:
        """Take over the parameters on the device before the next step. Collective."""
        super().wait()
        self._follow(range(len(self.buckets)))  # what comes still must not overwrite the new ones
        self._brought = [self._round] * len(self.buckets)
        self._versions = {}

    def release(self) -> None:
        """Give each parameter memory of its own on the device, and free the rest. Collective."""
        self.wait()
        self.lane.finish()
        if self._pinned is not None:
            self._pinned.close()
        self._near = []  # so each bucket goes once its parameters have memory of their own
        super().release()


def check_staged(planned: Sequence[Parameter], kept: Sequence[Parameter], group: Group) -> None:
    """Check that there is an optimizer's state to move to the host. Rank 0 tells what stays.

    Args:
        planned: the trained parameters.
        kept: those of them that are not divided.
        group: the ranks that divide the others.

    Raises:
        UserError: no parameter can be divided.
    """
    if not any(map(has_slabs, planned)):
        raise UserError(
            "memory.offload optimizer keeps the state of float32 and float64 parameters in the "
            f"host's memory, and these are {planned[0].dtype}",
            "keep parameters in float32 and set precision, or leave memory.offload out",
        )
    if kept and group.rank == 0:
        logger.info(
            "memory.offload optimizer leaves %s (%s of %s) with their optimizer on the "
            "GPU: ranks complete them together, or they are not row-major and of 32 or 64 bits",
            plural(len(kept), "parameter"),
            size_text(sum(p.nbytes for p in kept)),
            size_text(sum(p.nbytes for p in planned)),
        )
