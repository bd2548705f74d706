"""Computes the mean loss and the scores of held-out samples, on all ranks of any layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train.config import RunConfig
from hpc_train.data.by_length import cut_by_length
from hpc_train.data.lengths import lengths_of
from hpc_train.data.loader import Part
from hpc_train.data.order import evenly
from hpc_train.data.reader import Reader
from hpc_train.errors import UserError
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group
from hpc_train.seeds import mix
from hpc_train.training.assemble import Assembly
from hpc_train.training.device import moved
from hpc_train.training.evaluation import HELD_OUT
from hpc_train.training.scoring import Collector, check_rows_alike


class Validation:
    """The held-out samples of a job, and how its ranks compute their mean loss and their scores.

    Args:
        config: the configuration.
        reader: reads the held-out samples.
        made: the parts of the job.
        measure: computes the loss of a batch on the model's device, and tensors with a row for each
            of its samples, by name.
        counted: counts the items of a batch that its loss is the mean over; None: its samples.
        collector: makes what computes the scores of these rows; None: there are no scores.
    """

    def __init__(
        self,
        config: RunConfig,
        reader: Reader,
        made: Assembly,
        measure: Callable[[Any], tuple[Tensor, Mapping[str, Tensor]]],
        counted: Callable[[Any], int] | None,
        collector: Callable[[Group], Collector] | None = None,
    ) -> None:
        self.config, self.reader, self.made = config, reader, made
        self.measure, self.counted = measure, counted
        self.collector = collector
        self.seed_samples: Callable[[Sequence[int], Sequence[int]], None] | None = None
        """Gives each sample of the next micro-batch a seed of some numbers and its own number."""
        self.together = 1
        """How many neighbours among the held-out samples are computed together."""
        self._compared = False  # whether tensor-parallel ranks have compared rows

    def of(self, dataset: Any) -> Validation:
        """The same for other samples."""
        made = copy.copy(self)
        made.reader = Reader(dataset, self.reader.lock)
        return made

    def scores(self, size: int) -> dict[str, float]:
        """The mean loss as "loss", and the scores of the task by their names. Collective.

        Each held-out sample of the pass counts once.

        Args:
            size: the number of samples of a micro-batch, unless `data.micro_tokens` is given.

        Raises:
            HpcTrainError: the task's functions of scores have failed; on all ranks.
            UserError: there are no samples, or a score has the name "loss".
        """
        with agreed(self.made.grid.world):
            if self.reader.dataset is None or not len(self.reader.dataset):
                raise UserError(
                    "there are no held-out samples, so they have no loss",
                    "give TrainingTask a `validation` with samples",
                )
        world = self.made.grid.world
        with nullcontext() if self.collector is None else closing(self.collector(world)) as rows:
            loss = self._mean_loss(size, rows)
            found = {} if rows is None else rows.scores()
        with agreed(world):
            if "loss" in found:
                raise UserError(
                    "a score of the task has the name 'loss', which is that of the mean loss",
                    "give the score another name",
                )
        return {"loss": loss, **found}

    def _mean_loss(self, size: int, collector: Collector | None) -> float:
        """Compute the mean loss, and let the collector have the rows. Collective."""
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
                losses, rows = self._evaluate(
                    [moved(batch, made.device) for batch in batches], parts
                )
            for loss, count in zip(losses, items, strict=False):  # other ranks have no losses
                if count:  # the mean over nothing may be NaN
                    totals += torch.tensor([loss.item() * count, count], dtype=torch.float64)
            if collector is not None:
                collector.add(
                    [
                        (part.places, own)
                        for part, own in zip(parts, rows, strict=False)
                        if part.counted
                    ]
                )
        made.collectives.sum_(totals)
        return float(totals[0] / totals[1])

    def _read(self, indices: Sequence[int]) -> Any:
        """A batch of held-out samples. What the data set draws is the same each time."""

        def seed_of(place: int) -> int:
            return mix(self.config.run.seed, HELD_OUT, indices[place])

        with self.reader.naming("the held-out data"):
            # As in training: torch takes a tuple as an index of several dimensions.
            return self.reader.read(np.asarray(indices, np.int64), seed_of)

    def _evaluate(
        self, batches: list[Any], parts: list[Part]
    ) -> tuple[list[Tensor], list[Mapping[str, Tensor]]]:
        """Losses and rows of micro-batches, on the rank whose losses count; others return none."""
        rows: list[Mapping[str, Tensor]] = []

        def forward(number: int, virtual_stage: int) -> Tensor:
            if self.seed_samples is not None:
                self.seed_samples((self.config.run.seed, HELD_OUT), parts[number].places)
            loss, own = self.measure(batches[number])  # only the last stage comes back from there
            rows.append(own)
            return loss

        losses = []
        if batches:
            losses = self.made.layout.pipeline.evaluate(forward, [part.form for part in parts])
        if self.collector is not None and not self._compared:
            self._compared = True
            with agreed(self.made.grid.world):  # of each tensor group all ranks fail, or none
                check_rows_alike(rows, self.made.layout.gradients.tensor)
        return (losses, rows) if self.made.speaks else ([], [])

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
        mine, most = self._dealt(samples)
        for first in range(0, most, size * at_once):
            end = most if self.config.memory.zero == 3 else len(mine)
            cuts = range(first, min(first + size * at_once, end), size)
            wanted = [mine[begin : begin + size] for begin in cuts]
            yield [Part(some) if some else Part(range(1), counted=False) for some in wanted]

    def _dealt(self, samples: range | tuple[int, ...]) -> tuple[range | tuple[int, ...], int]:
        """The samples of this replica, and the largest number that a replica has."""
        grid, together = self.made.grid, self.together
        if together == 1:
            return samples[grid.coordinate.dp :: grid.dp], -(-len(samples) // grid.dp)
        begins = range(0, len(samples), together)
        mine = tuple(
            one
            for begin in begins[grid.coordinate.dp :: grid.dp]
            for one in samples[begin : begin + together]
        )
        return mine, min(len(samples), -(-len(begins) // grid.dp) * together)
