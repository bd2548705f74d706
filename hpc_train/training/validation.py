"""Computes the mean loss over held-out samples, on all ranks of any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hpc_train.config import RunConfig
from hpc_train.data.by_length import cut_by_length, lengths_of
from hpc_train.data.loader import Part
from hpc_train.data.order import evenly
from hpc_train.data.reader import Reader
from hpc_train.mpi.agreement import agreed
from hpc_train.seeds import mix
from hpc_train.training.assemble import Assembly
from hpc_train.training.device import moved
from hpc_train.training.evaluation import HELD_OUT


class Validation:
    """The held-out samples of a job, and how its ranks compute their mean loss.

    Args:
        config: the configuration.
        reader: reads the held-out samples.
        made: the parts of the job.
        loss: computes the loss of a batch on the model's device.
        counted: counts the items of a batch that its loss is the mean over; None: its samples.
    """

    def __init__(
        self,
        config: RunConfig,
        reader: Reader,
        made: Assembly,
        loss: Callable[[Any], Tensor],
        counted: Callable[[Any], int] | None,
    ) -> None:
        self.config, self.reader, self.made = config, reader, made
        self.loss, self.counted = loss, counted

    def mean(self, size: int) -> float:
        """The mean loss. Collective.

        Args:
            size: the number of samples of a micro-batch, unless `data.micro_tokens` is given.
        """
        made = self.made
        totals = torch.zeros(2, dtype=torch.float64)
        for parts in self._rounds(size):
            with agreed(made.grid.world):
                batches = [self._read(part.places) for part in parts]
                items = [
                    part.items(batch, self.counted)
                    for part, batch in zip(parts, batches, strict=True)
                ]
            with torch.no_grad():
                losses = self._evaluate([moved(batch, made.device) for batch in batches], parts)
            for loss, count in zip(losses, items, strict=False):  # other ranks have no losses
                if count:  # the mean over nothing may be NaN
                    totals += torch.tensor([loss.item() * count, count], dtype=torch.float64)
        made.collectives.sum_(totals)
        return float(totals[0] / totals[1])

    def _read(self, indices: Sequence[int]) -> Any:
        """A batch of held-out samples. What the data set draws is the same each time."""

        def seed_of(place: int) -> int:
            return mix(self.config.run.seed, HELD_OUT, indices[place])

        return self.reader.read(indices, seed_of)

    def _evaluate(self, batches: list[Any], parts: list[Part]) -> list[Tensor]:
        """The losses of micro-batches, on the rank whose losses count; others return none."""
        if not batches:
            return []
        losses = self.made.layout.pipeline.evaluate(
            lambda number, virtual_stage: self.loss(batches[number]), [part.form for part in parts]
        )
        return losses if self.made.speaks else []

    def _rounds(self, size: int) -> Iterator[list[Part]]:
        """Yield this replica's micro-batches in rounds. All replicas have as many rounds.

        With memory.zero 3 they also have as many micro-batches, because they gather parameters
        together. Some of these micro-batches do not count.
        """
        data, grid = self.config.data, self.made.grid
        held_out, at_once = self.reader.dataset, 2 * grid.pp - 1
        samples = evenly(len(held_out), data.validation_batches * data.batch)
        if data.micro_tokens is not None:
            for begin in range(0, len(samples), data.batch):
                some = samples[begin : begin + data.batch]
                with agreed(grid.world):
                    lengths = lengths_of(held_out, some)
                dealt = cut_by_length(lengths, grid.dp, data.micro_tokens)[grid.coordinate.dp]
                parts = [
                    replace(part, places=tuple(some[place] for place in part.places))
                    for part in dealt
                ]
                for first in range(0, len(parts), at_once):
                    yield parts[first : first + at_once]
            return
        mine, most = samples[grid.coordinate.dp :: grid.dp], -(-len(samples) // grid.dp)
        for first in range(0, most, size * at_once):
            end = most if self.config.memory.zero == 3 else len(mine)
            cuts = range(first, min(first + size * at_once, end), size)
            wanted = [mine[begin : begin + size] for begin in cuts]
            yield [Part(some) if some else Part(range(1), counted=False) for some in wanted]
