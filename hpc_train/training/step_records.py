"""Makes the records of logged steps, and says at the start of a job where it runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hpc_train
from hpc_train.config import RunConfig
from hpc_train.data.loader import Step
from hpc_train.host.memory import PeakMemory
from hpc_train.job import jobs
from hpc_train.models.gate import Gate
from hpc_train.monitoring.meter import Meter
from hpc_train.monitoring.peak import peak_flops
from hpc_train.mpi.runtime import Runtime
from hpc_train.parallel.batch_norm import has_synchronized
from hpc_train.training.assemble import Assembly
from hpc_train.training.device import moved
from hpc_train.training.flops import UncountedError, counted_flops

logger = logging.getLogger(__name__)


class StepRecords:
    """Measures steps and makes their records. All ranks call it.

    Args:
        config: the configuration.
        made: the parts of the job.
        tokens_per_sample: number of tokens of a sample; 0 if samples have no tokens.
    """

    def __init__(self, config: RunConfig, made: Assembly, tokens_per_sample: float) -> None:
        self.made, self.config = made, config
        self.group = made.grid.world
        self.tokens = tokens_per_sample
        self.meter = Meter(config.data.batch, self.group.waiting, tokens_per_sample)
        self.memory = PeakMemory()
        self.costly = True
        """Whether to measure what takes time to measure, such as memory."""
        self.peak = 0.0
        """Operations per second of all ranks at most; 0: not measured."""
        self.flops = made.flops
        """Operations of a sample's forward and backward pass; 0: not known."""
        self.uncounted = False
        """Whether they are counted in the next step."""
        self._steps, self._joules = 0, 0.0  # since and up to the last record

    def start(self) -> None:
        """Begin to measure."""
        self.meter.start()

    def count_step(self) -> None:
        """Count one more step."""
        self.meter.count_step()
        self._steps += 1

    def measure_peak(self) -> None:
        """Measure how fast all ranks compute at most. Collective."""
        self.group.barrier()
        try:
            mine = peak_flops(self.made.device, getattr(torch, self.config.precision.dtype))
        except (MemoryError, RuntimeError) as error:  # the latter if torch has no memory
            logger.warning("the peak of this rank cannot be measured: %s", error)
            mine = 0.0
        total, unknown = self.group.totals([round(mine), int(not mine)])
        self.peak = 0.0 if unknown else float(total)
        self.uncounted = self.peak > 0 and not self.flops

    def count_operations(self, loss: Callable[[Any, nn.Module], Tensor], step: Step) -> None:
        """Count the operations of a model whose shape is not known, by a micro-batch. Collective.

        Args:
            loss: the loss of a batch and a model.
            step: a step, whose first micro-batch is used.
        """
        self.uncounted = False
        self.flops, why = self.group.from_first(lambda: self._counted(loss, step))
        if why:
            logger.info("tflops and mfu are not reported, as operations are not counted: %s", why)
        self.start()  # counting takes a second, which is not the step's

    def _counted(self, loss: Callable[[Any, nn.Module], Tensor], step: Step) -> tuple[float, str]:
        """Operations of a sample; 0 with the reason if they cannot be counted."""
        config, model = self.config, self.made.model
        gated = any(isinstance(vars(one).get("forward"), Gate) for one in model.modules())
        state = self.made.checkpoints.state
        for refused, why in (
            (config.data.micro_tokens is not None, "the samples have different lengths"),
            (self.made.grid.tp * self.made.grid.pp > 1, "ranks share the model"),
            (
                bool(gated or state.streamed or state.pieces),
                "memory.zero shares its parameters among ranks",
            ),
            (has_synchronized(model), "its BatchNorm layers add up over the ranks"),
            (config.memory.recompute != "none", "memory.recompute repeats some of them"),
        ):
            if refused:
                return 0.0, why
        batch = step.micro_batches[0]
        try:
            found = counted_flops(
                lambda copied, data: loss(data, copied),
                model,
                moved(batch.data, self.made.device),
            )
        except UncountedError as error:
            return 0.0, " ".join(str(error).split())
        return found / batch.part.count, ""

    def costs_at_start(self) -> dict[str, Any]:
        """What the event "start" says about costs. Collective."""
        costs = self.made.costs
        costs.unify()
        self._joules = costs.total.joules
        peak = {"peak_flops": self.peak / self.group.size} if self.peak else {}
        return {**peak, "energy": costs.reader, **costs.total.known()}

    def measured(self) -> dict[str, Any]:
        """What was measured since the last record, as parts of a record. Collective."""
        record: dict[str, Any] = self.meter.take()
        if self.costly:
            record["memory_gb"] = self._memory()
            record |= self._costs(record["samples_per_second"])
        record |= self.made.substituted.record()
        if self.made.scaler is not None:
            record["skipped_steps"] = self.made.scaler.skipped_steps
        return record

    def _costs(self, samples_per_second: float) -> dict[str, float]:
        """Speed and costs, as parts of a record. Collective."""
        costs, found = self.made.costs, {}
        costs.unify()
        if self.flops:
            found["tflops"] = samples_per_second * self.flops / 1e12
            if self.peak:
                found["mfu"] = samples_per_second * self.flops / self.peak
        found |= costs.total.known()
        samples, joules = self._steps * self.config.data.batch, costs.total.joules - self._joules
        if joules > 0:
            found["samples_per_joule"] = samples / joules
            if self.tokens:
                found["tokens_per_joule"] = samples * self.tokens / joules
        self._steps, self._joules = 0, costs.total.joules
        return found

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
