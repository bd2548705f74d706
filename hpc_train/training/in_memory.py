"""Trains without files: for short trainings whose result is wanted in memory."""

from __future__ import annotations

import logging

from torch import Tensor

from hpc_train.checkpoint.weights import whole_tensors
from hpc_train.config import RunConfig
from hpc_train.data.loader import MicroBatch, Step
from hpc_train.errors import ConfigError
from hpc_train.monitoring.console import describe_record
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.watchdog import watch_over
from hpc_train.training.evaluation import train_mode
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

logger = logging.getLogger(__name__)

WITH_FILES: tuple[str, ...] = (
    "checkpoint",
    "run.dir",
    "run.time_limit",
    "run.end_margin",
    "run.hang_steps",
)
WITH_FILES += (
    "run.preflight",
    "run.trackers",
    "data.prefetch",
    "data.workers",
    "data.micro_tokens",
)
"""Keys, and sections, of the configuration that `InMemoryTrainer` does not use."""


class InMemoryTrainer(Trainer):
    """A Trainer that writes no files, has no checkpoints, and heeds no signals and time limits.

    It reads no batch ahead, so the data set should be in memory. Its steps are those of `Trainer`:
    the same losses on any layout. All ranks must make it and call `train`.

    Args:
        config: the configuration, without the keys of WITH_FILES.
        task: the model, its loss and its data. The data set has `fetch` and draws no random
            numbers.
        runtime: the runtime from `hpc_train.mpi.runtime.start_runtime`.

    Raises:
        HpcTrainError: as `Trainer`.
    """

    def __init__(self, config: RunConfig, task: TrainingTask, runtime: Runtime) -> None:
        if config.data.micro_batch == "auto" or config.data.micro_tokens is not None:
            raise ConfigError(
                "data.micro_batch is auto, or data.micro_tokens is given, for a training in memory",
                "give data.micro_batch a number, or leave both out",
            )
        super().__init__(config, task, runtime)
        self.step_records.costly = False
        self.weights: dict[str, Tensor] = {}
        """The whole model's tensors by name, on the CPU of each rank, once `train` has ended: those
        with the lowest validation loss, or those of the last step if nothing is held out."""
        self.records: list[dict[str, float]] = []
        """The numbers of the steps that `run.log_every` reports, as in metrics.jsonl."""

    def _train(self) -> int:
        """Take all steps. Returns the last one. Collective."""
        step = 0
        with watch_over(self.group, self.config.run.hang_timeout):
            train_mode(self.model)
            self.step_records.start()
            for step in range(1, self.plan.last + 1):
                self._train_step(self._read(step), self._record)
                if self.patience.over:
                    break
            if not self.weights:
                self.weights = self._whole()
        return step

    def _record(self, record: dict[str, float]) -> None:
        self.records.append(record)
        if self.shown and self.group.rank == 0:
            logger.info(describe_record(record))

    def _read(self, number: int) -> Step:
        """This rank's micro-batches of a step."""
        order, parts = self.plan.order, self.plan.parts
        assert isinstance(parts, list)
        micro_batches = []
        for part in parts:
            data = self.reader.read_beside(order.indices(number, part.first, part.count))
            micro_batches.append(MicroBatch(part, data, part.items(data, self.counted)))
        return Step(number, order.epoch(number), micro_batches)

    def _validated(self, step: int, loss: float) -> None:
        """Note a validation loss, and keep the weights if none is lower. Collective."""
        if self.patience.note(step, loss):
            self.weights = self._whole()

    def _whole(self) -> dict[str, Tensor]:
        """Copies of the model's tensors, after they were made the same on all ranks. Collective."""
        self.checkpoints.unify()
        return whole_tensors(self.checkpoints.state)
