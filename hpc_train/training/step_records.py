"""Makes the records of logged steps, and says at the start of a job where it runs."""

from __future__ import annotations

import os
from typing import Any

import torch

import hpc_train
from hpc_train.config import RunConfig
from hpc_train.host.memory import PeakMemory
from hpc_train.job import jobs
from hpc_train.job.reporting import RunReport
from hpc_train.monitoring.meter import Meter
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.assemble import Assembly
from hpc_train.training.performance import PerformanceTest


class StepRecords:
    """Measures steps and makes their records. All ranks call it.

    Args:
        config: the configuration.
        made: the parts of the job.
        tokens_per_sample: number of tokens of a sample; 0 if samples have no tokens.
    """

    def __init__(self, config: RunConfig, made: Assembly, tokens_per_sample: float) -> None:
        self.made = made
        self.group = made.grid.world
        self.meter = Meter(config.data.batch, self.group.waiting, tokens_per_sample)
        self.memory = PeakMemory()
        self.costly = True
        """Whether to measure what takes time to measure, such as memory."""
        self.test = PerformanceTest.of(config, made, tokens_per_sample)

    def start(self, report: RunReport | None = None) -> None:
        """Begin to measure.

        Args:
            report: the reports of the run, which get the records; None: there are none.
        """
        self.meter.start()
        if self.test and report:
            self.test.start(report)

    def count_step(self) -> None:
        """Count one more step."""
        self.meter.count_step()
        if self.test:
            self.test.count_step()

    def measured(self) -> dict[str, Any]:
        """What was measured since the last record, as parts of a record. Collective."""
        record: dict[str, Any] = self.meter.take()
        if self.costly:
            record["memory_gb"] = self._memory()
        record |= self.made.substituted.record()
        if self.made.scaler is not None:
            record["skipped_steps"] = self.made.scaler.skipped_steps
        return record

    def _memory(self) -> float:
        """GB (10^9 bytes) of the rank that has used most since the last record. Collective."""
        used, device = self.memory.take(), self.made.device
        if device.type == "cuda":
            used = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        return self.group.largest(used) / 1e9


def start_event(runtime: Runtime, made: Assembly, after: int) -> dict[str, Any]:
    """What the event "start" says about a job: its ranks, hosts and layout. Collective.

    Args:
        runtime: the job's runtime.
        made: the parts of the job.
        after: the step after which training resumes.
    """
    placement = made.grid.placement
    topology = placement.topology
    device = made.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    places = [placement.coordinate(rank) for rank in range(topology.size)]
    return {
        "after": after,
        "job": jobs.own_place(os.environ).job,
        "version": hpc_train.__version__,
        "device": name,
        "cores": runtime.cores,
        "hosts": list(topology.hosts),
        "layout": {"dp": made.grid.dp, "tp": made.grid.tp, "pp": made.grid.pp},
        # for each rank: the number of its host, and its place along dp, tp and pp
        "ranks": [
            [topology.node[rank], place.dp, place.tp, place.pp] for rank, place in enumerate(places)
        ],
    }
