"""The loss of a micro-batch on one rank: its random draws, number format and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.data.generators import seed_process
from hpc_train.data.loader import MicroBatch
from hpc_train.parallel.vocabulary import whole_logits_missed
from hpc_train.seeds import mix, mix_each
from hpc_train.training.assemble import Assembly
from hpc_train.training.task import TrainingTask, call_with_parts, checked_loss


class BatchLoss:
    """Computes the losses of micro-batches in the number format of the configuration.

    Args:
        task: the task, which has the loss and the scores.
        made: the model, its layout and the scaler.
        seed: `run.seed`.
    """

    def __init__(self, task: TrainingTask, made: Assembly, seed: int) -> None:
        self.task, self.made, self.base = task, made, seed
        self.loss = task.loss or call_with_parts

    def __call__(self, batch: Any, model: nn.Module | None = None) -> Tensor:
        """The loss of a micro-batch.

        Args:
            batch: the micro-batch.
            model: stands in for the rank's own model, to count operations.
        """
        with self._computing():
            return checked_loss(self.loss(model or self.made.model, batch))

    def measured(self, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of held-out samples, and the rows that the task's scores need."""
        if self.task.scores is None:
            return self(batch), {}
        with self._computing():
            loss, rows = self.task.scores.measure(self.made.model, batch)
            return checked_loss(loss), rows

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute in the number format. Errors say what this rank's part of the model explains."""
        made, scaler = self.made, self.made.scaler
        form = nullcontext() if scaler is None else torch.autocast(made.device.type, scaler.dtype)
        with form, whole_logits_missed(made.model, made.layout.gradients.tensor):
            yield

    def seed(self, step: int, micro_batch: MicroBatch, virtual_stage: int) -> None:
        """Seed the random generators, and the model's own draws, for a micro-batch."""
        grid, part = self.made.grid, micro_batch.part
        # Other layers draw other numbers.
        stage = virtual_stage * grid.pp + grid.coordinate.pp
        seed_process(mix(self.base, step, part.first, *([stage] if stage else [])))
        self.seed_samples((self.base, step), part.places)

    def seed_samples(self, numbers: Sequence[int], last: Sequence[int]) -> None:
        """Give the model and the loss a seed for each sample, if they draw for samples."""
        for one in (self.made.model, self.loss):
            seed_samples: Any = getattr(one, "seed_samples", None)
            if seed_samples is not None:
                seed_samples(mix_each(numbers, last))
