"""Adasum: updates that point the same way are averaged, updates that do not are added.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021,
https://arxiv.org/abs/2006.02924
"""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpc_train.collectives import connect
from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import UserError
from hpc_train.gradients import added
from hpc_train.gradients.buckets import plan_buckets
from hpc_train.gradients.census import Facts, Place
from hpc_train.gradients.hooks import Closure
from hpc_train.gradients.horovod_sums import DistributedSums
from hpc_train.gradients.mpi import BucketAverager
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.state import average_state
from hpc_train.gradients.sums import CollectiveSums
from hpc_train.gradients.torch_scaler import refuse_scaler
from hpc_train.mpi.group import Group


class AdasumAverager(BucketAverager):
    """Combines the ranks' optimizer steps in place of their gradients.

    Each rank takes a step of its own from the same parameters. Then every rank adds the combination
    of all steps to these parameters, as Horovod's own optimizer for Adasum does. For two ranks the
    combination is

        (1 - ab / 2aa) a + (1 - ab / 2bb) b,

    where a and b are the steps of one parameter. Four ranks combine the results of two pairs.

    Gradients are never averaged. `average` only gives a rank zeros for the gradients that other
    ranks have and it has not. `norm` is the norm of all ranks' gradients side by side, the same
    number on all ranks. The optimizer's moments also differ between ranks until `settle` averages
    them.

    Args:
        hvd: the module horovod.torch, initialised.
        model, optimizer: as for `BucketAverager`.
        group: all ranks of the job; their number is a power of two.
        bucket_bytes: size of the steps that are combined in one operation.

    Raises:
        UserError: the group is not the whole job, or its size is not a power of two.
    """

    def __init__(
        self,
        hvd: Any,
        model: nn.Module,
        optimizer: Optimizer,
        group: Group,
        bucket_bytes: int,
    ) -> None:
        _check(group, hvd.size())
        nothing = CollectiveSums(AloneCollectives(Group(waiting=group.waiting)), [])
        self.bucket_bytes = bucket_bytes
        self._before: list[list[Tensor]] = []
        super().__init__(model, optimizer, group, lambda _: ([], nothing), Progress())
        self.awaited = f"the steps of {group.size} ranks"
        self.hvd = hvd
        self.shards = connect(group)
        self.at_close.append(refuse_scaler(optimizer))
        self._label = DistributedSums.label(group)

    def _plan(self) -> None:
        super()._plan()
        self.planned = plan_buckets([p for p in self.trained if p.numel()], self.bucket_bytes)

    def average(self) -> None:
        """Set gradients that other ranks have, and this one has not, to zero. Collective."""
        if self._done:
            return
        with self.group.waiting(self.awaited):
            heard = self._heard()
            if heard.changed:
                added.check_alike(self.group, self._new())
                self._replan()
                heard = self._heard()  # once more, because `trained` has others now
        for parameter, used in zip(self.trained, heard.used.tolist(), strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._done, self._drops = True, 0

    def _heard(self) -> Facts:
        """Which parameters have a gradient on any rank. Collective."""
        there = np.array([p.grad is not None for p in self.trained], bool)
        facts = Facts(there, changed=self._changed())
        return self.progress.complete(self._told(Place.AVERAGE, facts))

    def norm(self) -> Tensor:
        """The 2-norm of all ranks' gradients side by side, float64. Collective."""
        total = super().norm().square()
        self.shards.sum_(total)
        return total.sqrt()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = super()._before_step(optimizer, args, kwargs)  # averages, and may plan anew
        self._before = [[p.detach().clone() for p in some] for some in self.planned]
        return changed

    def _averaged(self, closure: Closure) -> Closure:
        # Ranks step by their own gradients, so they may call it differently often.
        raise UserError(
            "reduction adasum combines the ranks' own steps, and a step with a closure was called",
            "leave the closure out, or use reduction mean",
        )

    def follow(self, optimizer: Optimizer) -> None:
        """Refuse another optimizer, whose steps nobody would combine.

        Raises:
            UserError: always.
        """
        raise UserError(
            "reduction adasum combines the steps of one optimizer, and averager.follow was called",
            "give one optimizer all parameters, or use reduction mean",
        )

    def _after_step(self) -> None:
        """Replace the step by the combination of all ranks' steps."""
        super()._after_step()
        # Horovod combines in place: the parameters become the steps, and then parameters again.
        before, self._before = self._before, []
        begin = time.perf_counter()
        planned = zip(self.planned, before, strict=True)
        steps = [[p.detach().sub_(old) for p, old in zip(*some, strict=True)] for some in planned]
        sent = [[_as_sent(step) for step in some] for some in steps]
        with self.group.waiting("the combination of the steps by Horovod"):
            self._combine(sent)
        for step, found, old in zip(*map(chain.from_iterable, (steps, sent, before)), strict=True):
            if found is not step:
                step.copy_(torch.view_as_complex(found) if step.is_complex() else found)
            step.add_(old)
        nbytes = sum(found.nbytes for found in chain.from_iterable(sent))
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
        """Average the optimizer's moments, so that all ranks have the same state. Collective."""
        average_state(self.optimizer, self.shards)


def _as_sent(step: Tensor) -> Tensor:
    """The step itself, or a copy that Horovod can combine: row-major, real, not bfloat16."""
    if step.is_complex():
        step = torch.view_as_real(step)
    return (step.float() if step.dtype == torch.bfloat16 else step).contiguous()


def _check(group: Group, job: int) -> None:
    if group.size < job:
        raise UserError(
            f"reduction adasum needs all {job} ranks of the job, and the group has {group.size}",
            "leave parallel.tp and parallel.pp at 1, or use reduction mean",
        )
    if group.size & (group.size - 1):
        raise UserError(
            f"reduction adasum needs a number of ranks that is a power of two, not {group.size}",
            f"use {1 << group.size.bit_length() - 1} ranks, or reduction mean",
        )
