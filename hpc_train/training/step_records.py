"""Makes the records of logged steps, and says at the start of a job where it runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import hpc_train
from hpc_train.config import RunConfig
from hpc_train.data.mixture import shares_drawn
from hpc_train.errors import Stopped
from hpc_train.host.commit import commit_of
from hpc_train.host.memory import PeakMemory
from hpc_train.job import jobs
from hpc_train.job.reporting import RunReport
from hpc_train.job.slow_ranks import SlowRanks
from hpc_train.monitoring.communication import describe_operations, event_of
from hpc_train.monitoring.device_seconds import DeviceSeconds
from hpc_train.monitoring.meter import Meter
from hpc_train.mpi.placement import Placement
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.traffic import totals
from hpc_train.training.assemble import Assembly
from hpc_train.training.device import threads_in_use
from hpc_train.training.performance import PerformanceTest
from hpc_train.training.step_costs import StepCosts

COMMUNICATION_SECONDS = (30.0, 1800.0)
"""The least and the most seconds between two events "communication" of a running job."""

logger = logging.getLogger(__name__)


class StepRecords:
    """Measures steps and makes their records. All ranks call it.

    Args:
        config: the configuration.
        made: the parts of the job.
        runtime: the job's runtime.
        tokens_per_sample: number of tokens of a sample; 0 if samples have no tokens.

    Attributes:
        links: the bandwidths that `preflight` has measured.
    """

    def __init__(
        self, config: RunConfig, made: Assembly, runtime: Runtime, tokens_per_sample: float
    ) -> None:
        self.made, self.runtime = made, runtime
        self.group = made.grid.world
        self.meter = Meter(config.data.batch, self.group.waiting, tokens_per_sample)
        self.memory = PeakMemory()
        self.costly = True
        """Whether to measure what takes time to measure, such as memory."""
        self.costs = StepCosts(config, made, tokens_per_sample)
        self.test = PerformanceTest.of(config, made, tokens_per_sample)
        self.links: dict[str, float] = {}
        placement = made.grid.placement
        topology, ranks = placement.topology, range(self.group.size)
        self.hosts = [topology.hosts[topology.node[rank]] for rank in ranks]
        stages = [placement.coordinate(rank).pp for rank in ranks]
        self._device = DeviceSeconds.of(made.device)
        self._slow = SlowRanks(runtime, self.hosts, stages, self._device)
        self._report: RunReport | None = None
        self._begin = self._written = 0.0

    def start(self) -> None:
        """Begin to measure."""
        self.meter.start()
        self._slow.start()

    @contextmanager
    def measuring(self, report: RunReport, after: int) -> Iterator[None]:
        """Measure all steps in this block, and say at its end what the ranks communicated.

        Collective, unless the block fails.

        Args:
            report: the reports of the run.
            after: the step after which training resumes.
        """
        self._report = report
        made = self.made
        report.order = made.plan.order
        started = start_event(self.runtime, made.grid.placement, made.device, after)
        more = report.begun | self.links | self.costs.at_start()
        report.event("start", after, **started, **more)
        self.start()
        if self.test:
            self.test.start(report)
        self.group.waiting.traffic.clear()
        self._begin = self._written = time.monotonic()
        try:
            yield
        except Stopped as stopped:  # on all ranks
            self._say_communication(stopped.step)
            raise
        self._say_communication(report.last_step)

    def computing(self) -> AbstractContextManager[None]:
        """A context around what a step computes before its gradients are averaged."""
        return self._device or nullcontext()

    def count_step(self) -> None:
        """Count one more step."""
        self.meter.count_step()
        if self.test:
            self.test.count_step()
        if self.costly:
            self._slow.count_step()
            self.costs.count_step()

    def measured(self, step: int) -> dict[str, Any]:
        """What was measured since the last record, as parts of a record. Collective."""
        record: dict[str, Any] = self.meter.take()
        if self.costly:
            mine = most_memory(self.made.device, self.memory), int(self._is_due())
            used, due = self.group.largest_each(mine)
            record["memory_gb"] = used / 1e9
            if due:
                self._write_communication(step)
            record |= self.costs.take(record["samples_per_second"])
            record |= self._slow_rank(step)
        record |= self.made.substituted.record()
        record |= shares_drawn(self.made.plan.order, step)
        if self.made.scaler is not None:
            record["skipped_steps"] = self.made.scaler.skipped_steps
        return record

    def _slow_rank(self, step: int) -> dict[str, Any]:
        """The slow rank, if there is one, as parts of a record. Collective."""
        new, report = self._slow.take(), self._report
        if new is not None and report is not None:
            report.event("slow", step, host=self.hosts[new.rank], **new._asdict())
        named = self._slow.named
        return {} if named is None else {"slow_rank": named.rank, "slow_seconds": named.seconds}

    def _is_due(self) -> bool:
        """Whether to write what the ranks have communicated, as a killed job has no end. On rank 0.

        That is when the time since the start has doubled, and at least each half hour.
        """
        now, so_far = time.monotonic(), self._written - self._begin
        passed = min(max(so_far, COMMUNICATION_SECONDS[0]), COMMUNICATION_SECONDS[1])
        if self.group.rank or now - self._written < passed:
            return False
        self._written = now
        return True

    def _say_communication(self, step: int) -> None:
        """Write and log what the ranks have communicated. Collective."""
        told = self._write_communication(step)
        if told:
            logger.info("%s", describe_operations(told))

    def _write_communication(self, step: int) -> list[dict[str, Any]]:
        """Write what the ranks have communicated since the start. Collective.

        Returns:
            The operations, on rank 0.
        """
        if self.group.comm is None:
            return []
        mine = self.group.waiting.traffic.counted()
        everyone = self.group.gathered_by_first(mine, "what the ranks have communicated")
        operations = totals(everyone, self.hosts) if everyone else []
        told = event_of(operations, self.links)
        if told and self._report is not None:
            self._report.event("communication", step, operations=told)
        return told


def most_memory(device: torch.device, memory: PeakMemory) -> int:
    """The most bytes that this rank has used at a time since the last call."""
    used = memory.take()
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return used


def start_event(
    runtime: Runtime, placement: Placement, device: torch.device, after: int
) -> dict[str, Any]:
    """What the event "start" says about a job: its ranks, hosts and layout. Collective.

    Args:
        runtime: the job's runtime.
        placement: the ranks in their layout.
        device: the device that this rank computes on.
        after: the step after which training resumes.
    """
    topology = placement.topology
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    places = [placement.coordinate(rank) for rank in range(topology.size)]
    return {
        "after": after,
        "job": jobs.own_place(os.environ).job,
        "version": hpc_train.__version__,
        "commit": commit_of(Path.cwd()),
        "device": name,
        "cores": runtime.cores,
        "threads": threads_in_use(runtime.world, device),
        "hosts": list(topology.hosts),
        "layout": {"dp": placement.dp, "tp": placement.tp, "pp": placement.pp},
        # for each rank: the number of its host, and its place along dp, tp and pp
        "ranks": [
            [topology.node[rank], place.dp, place.tp, place.pp] for rank, place in enumerate(places)
        ],
    }
