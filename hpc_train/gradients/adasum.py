"""Adasum: updates that point the same way are averaged, updates that do not are added.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021,
https://arxiv.org/abs/2006.02924
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import connect
from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import UserError
from hpc_train.gradients.horovod import HorovodSums
from hpc_train.gradients.mpi import MpiAverager
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.state import average_state
from hpc_train.gradients.sums import CollectiveSums
from hpc_train.mpi.group import Group


class AdasumAverager(MpiAverager):
    """Combines the ranks' optimizer steps in place of their gradients.

    As Horovod's own optimizer for Adasum does: each rank takes a step of its own, from the same
    parameters, and all go on from there with the combination of their steps. For two ranks this is

        (1 - ab / 2aa) a + (1 - ab / 2bb) b,

    where a and b are the steps of one parameter; four ranks combine the results of two pairs.
    Gradients stay each rank's own: `average` only fills in those that are missing, and `norm` is
    that of all ranks' gradients side by side, the same number on all ranks. So do the optimizer's
    moments, until `settle` averages them.

    Args:
        hvd: the module horovod.torch, initialised.
        model, optimizer: as for `MpiAverager`.
        group: all ranks of the job, a power of two.
        planned: the parameters, those of one list combined in one operation.

    Raises:
        UserError: the ranks are not all, or no power of two.
    """

    def __init__(
        self,
        hvd: Any,
        model: nn.Module,
        optimizer: Optimizer,
        group: Group,
        planned: Sequence[Sequence[Parameter]],
    ) -> None:
        _check(group, hvd.size())
        nothing = CollectiveSums(AloneCollectives(Group(waiting=group.waiting)), [])
        super().__init__(model, optimizer, group, [], nothing, Progress())
        self.hvd = hvd
        self.shards = connect(group)
        whole = [[p for p in some if p.numel()] for some in planned]
        self.planned = [some for some in whole if some]
        self._label = HorovodSums.label(group)

    def norm(self) -> Tensor:
        """The 2-norm of all ranks' gradients side by side, float64. Collective."""
        total = super().norm().square()
        self.shards.sum_(total)
        return total.sqrt()

    def step(self) -> None:
        """Take a step, and replace it by the combination of all ranks' steps. Collective."""
        steps = [[p.detach() for p in some] for some in self.planned]  # once `before` is taken off
        before = [[tensor.clone() for tensor in some] for some in steps]
        super().step()
        begin = time.perf_counter()
        pairs = [
            pair for some in zip(steps, before, strict=True) for pair in zip(*some, strict=True)
        ]
        for tensor, old in pairs:
            tensor.sub_(old)
        with self.group.waiting("the combination of the steps by Horovod"):
            self._combine(steps)
        for tensor, old in pairs:
            tensor.add_(old)
        nbytes = sum(old.nbytes for _, old in pairs)
        self.profile.add(0.0, time.perf_counter() - begin, nbytes)

    def _combine(self, steps: list[list[Tensor]]) -> None:
        handles = [
            self.hvd.grouped_allreduce_async_(
                some, name=f"{self._label}.{number}", op=self.hvd.Adasum
            )
            for number, some in enumerate(steps)
        ]
        for handle in handles:
            self.hvd.synchronize(handle)

    def settle(self) -> None:
        """Average the optimizer's moments: all ranks then have one state. Collective."""
        average_state(self.optimizer, self.shards)


def _check(group: Group, job: int) -> None:
    if group.size < job:
        raise UserError(
            f"reduction adasum is over all ranks of the job, {job}, not {group.size} of them",
            "leave parallel.tp and parallel.pp at 1, or use reduction mean",
        )
    if group.size & (group.size - 1):
        raise UserError(
            f"reduction adasum takes a power of two of ranks, not {group.size}",
            f"use {1 << group.size.bit_length() - 1} ranks, or reduction mean",
        )
