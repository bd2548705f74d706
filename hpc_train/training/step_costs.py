"""How many operations per second steps compute, and what the run costs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.config import RunConfig
from hpc_train.data.loader import Step
from hpc_train.models.gate import Gate
from hpc_train.monitoring.peak import peak_flops
from hpc_train.parallel.batch_norm import has_synchronized
from hpc_train.training.assemble import Assembly
from hpc_train.training.device import moved
from hpc_train.training.flops import UncountedError, counted_flops

logger = logging.getLogger(__name__)


class StepCosts:
    """Measures speed beside the peak, and costs beside the work. All ranks call it.

    Args:
        config: the configuration.
        made: the parts of the job.
        tokens_per_sample: number of tokens of a sample; 0 if samples have no tokens.
    """

    def __init__(self, config: RunConfig, made: Assembly, tokens_per_sample: float) -> None:
        self.config, self.made, self.tokens = config, made, tokens_per_sample
        self.group = made.grid.world
        self.peak = 0.0
        """Operations per second of all ranks at most; 0: not measured."""
        self.flops = made.flops
        """Operations of a sample's forward and backward pass; 0: not known."""
        self.uncounted = False
        """Whether they are counted in the next step."""
        self._steps = 0  # since the last record

    def count_step(self) -> None:
        """Count one more step."""
        self._steps += 1

    def measure_peak(self) -> None:
        """Measure how fast all ranks compute at most. Collective."""
        self.group.barrier()
        try:
            mine = peak_flops(self.made.device, getattr(torch, self.config.precision.dtype))
        except (MemoryError, RuntimeError) as error:  # the latter if torch has no memory
            logger.warning("the peak of this rank cannot be measured: %s", error)
            mine = 0.0
        # 64 bits have no room for ten thousand GPUs.
        total, unknown = self.group.summed([round(mine), int(not mine)])
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
            # Code that is counted first is not compiled afterwards.
            (config.run.compile, "run.compile makes other code of the model"),
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

    def at_start(self) -> dict[str, Any]:
        """What the event "start" says about costs. Collective."""
        peak = {"peak_flops": self.peak / self.group.size} if self.peak else {}
        return {**peak, **self.made.costs.at_start()}

    def take(self, samples_per_second: float) -> dict[str, float]:
        """Speed and costs since the last record, as parts of a record. Collective."""
        found = {}
        if self.flops:
            found["tflops"] = samples_per_second * self.flops / 1e12
            if self.peak:
                found["mfu"] = samples_per_second * self.flops / self.peak
        steps, self._steps = self._steps, 0
        return found | self.made.costs.of_record(steps * self.config.data.batch, self.tokens)
