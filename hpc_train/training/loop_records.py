"""The records and events of a user's own loop."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpc_train.data.mixture import shares_drawn
from hpc_train.data.order import SampleOrder
from hpc_train.errors import UserError
from hpc_train.host.memory import PeakMemory
from hpc_train.job.reporting import RunReport
from hpc_train.job.slow_ranks import SlowRanks
from hpc_train.monitoring.meter import Meter
from hpc_train.monitoring.records import LOOP_KEYS
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group
from hpc_train.mpi.phases import WAIT
from hpc_train.mpi.placement import place
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import discover
from hpc_train.training.costs import RunCosts
from hpc_train.training.step_records import most_memory, start_event

SEEN = ("data", WAIT, "save", "evaluation")
"""The phases that a loop of others has; what else its steps do, only their program knows."""
ONE_NUMBER = "give numbers, or tensors with one element"


class LoopRecords:
    """Measures the steps of a loop, and writes what the program records. Collective to make.

    Args:
        runtime: the runtime of the job.
        optimizer: the optimizer of the loop.
        device: the device of the model.
        report: the reports of the run.
        order: the order of the samples.
        costs: what the run costs. Its ranks communicate as those of `write` do.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: Optimizer,
        device: torch.device,
        report: RunReport,
        order: SampleOrder,
        costs: RunCosts,
    ) -> None:
        self.group, self.optimizer, self.report = runtime.world, optimizer, report
        self.device, self.order, self.costs = device, order, costs
        report.order = order
        self.meter = Meter(order.batch, self.group.waiting, phases=SEEN)
        self.memory = PeakMemory()
        topology = discover(runtime.world, runtime.node)
        placement = place(topology, None, 1, 1)
        after = report.last_step
        started = start_event(runtime, placement, device, after)
        report.event("start", after, **started, **report.begun, **costs.at_start())
        self.hosts = [topology.hosts[node] for node in topology.node]
        self._slow = SlowRanks(runtime, self.hosts, [0] * self.group.size)
        self._recorded, self._after = 0, after  # the step of the last record of this start

    def begin_step(self) -> None:
        """Count one more step, and name a slow rank if there is one. Collective."""
        self._slow.count_step()
        if (new := self._slow.take()) is not None:
            step = self.report.last_step
            self.report.event("slow", step, host=self.hosts[new.rank], **new._asdict())
        self.meter.count_step()

    def write(
        self, calls: Group, step: int, values: Mapping[str, Tensor | float]
    ) -> dict[str, float]:
        """Write a record of a step. Returns the means of the values. Collective.

        Args:
            calls: all ranks, with a communicator that only the program's calls use.
            step: the number of the step.
            values: this rank's values.

        Raises:
            UserError: a name or a value is wrong, the ranks have different names, or the step has a
                record; on all ranks.
        """
        with agreed(calls, "loop.record"):
            mine = self._checked(step, values)
        same(
            calls,
            "the set of names that loop.record was given",
            repr(sorted(mine)),
            "give all ranks the same",
        )
        everyone = calls.gathered(mine, "loop.record")
        means = {name: math.fsum(rank[name] for rank in everyone) / calls.size for name in mine}
        record = {"step": step, "epoch": self.order.epoch(step) + 1, **means}
        record |= {"lr": self.optimizer.param_groups[0]["lr"], **self.meter.take()}
        record |= shares_drawn(self.order, step)
        record["memory_gb"] = calls.largest(most_memory(self.device, self.memory)) / 1e9
        since = max(self._recorded, self._after)
        record |= self.costs.of_record((step - since) * self.order.batch)
        if self._slow.named is not None:
            named = self._slow.named
            record |= {"slow_rank": named.rank, "slow_seconds": named.seconds}
        self._recorded = step
        self.report.record(record)
        return means

    def _checked(self, step: int, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """The values as numbers."""
        if step == self._recorded:
            raise UserError(
                f"loop.record was called twice in step {step}", "call it at most once in a step"
            )
        own = LOOP_KEYS | shares_drawn(self.order, step).keys()
        if taken := sorted(own & values.keys()):
            raise UserError(
                f"loop.record was given {taken[0]}, which each record has by itself",
                "give it another name",
            )
        return {
            name: _number(value, f"loop.record was given {name}") for name, value in values.items()
        }


def mean_of(group: Group, value: Tensor | float) -> float:
    """The mean of a number over the ranks. Collective.

    Raises:
        UserError: a rank has given something else; on all ranks.
    """
    mine: float | str
    try:
        mine = _number(value, "loop.mean was given a value")
    except UserError as error:  # the others learn of it here, so that none waits
        mine = f"rank {group.rank} ({group.host}): {error.cause}"
    everyone = group.gathered(mine, "loop.mean")
    for other in everyone:
        if isinstance(other, str):
            told = UserError(other, ONE_NUMBER)
            told.agreed = True
            raise told
    return sum(everyone) / group.size  # type: ignore[arg-type]


def _number(value: Tensor | float, what: str) -> float:
    """A number, or a tensor with one element, as a float.

    Raises:
        UserError: the value is something else. The message begins with `what`.
    """
    try:
        kept = torch.float64 if isinstance(value, float) else None  # else it takes float32
        tensor = torch.as_tensor(value, dtype=kept).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kind = type(value).__name__
        raise UserError(
            f"{what} of type {kind}, which torch takes for no number", ONE_NUMBER
        ) from None
    if tensor.numel() != 1:
        raise UserError(f"{what} of shape {tuple(tensor.shape)}", ONE_NUMBER)
    if tensor.is_complex():
        raise UserError(f"{what} of type {tensor.dtype}", ONE_NUMBER)
    return float(tensor)
