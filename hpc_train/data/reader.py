"""Reads batches of any data set; random numbers that it draws belong to the samples.

A data set may draw from generators that the whole process shares. What they give depends on
everything that was drawn before: on the rank, the batches before, and where a run was resumed. So a
data set that draws has them seeded before each sample, and put back behind the batch: the model
draws as if nobody had read in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from hpc_train.data.generators import Generator, of_gpu, of_process, own
from hpc_train.errors import UserError
from hpc_train.seeds import mix

Indices = Sequence[int] | np.ndarray
SAMPLE_STREAM = 1  # distinguishes what samples draw from what the model draws


class Reader:
    """Reads from one data set, in one thread at a time.

    Args:
        dataset: `dataset.fetch(indices)` gives a batch of samples, or, as for any map-style data
            set of torch, `dataset[i]` a sample, put together by torch's `default_collate`.
        lock: is held while it reads; data sets that may have something in common share one.
        collate_fn: puts a list of samples together in place of `default_collate`.

    `place` says what was read last, for a message. `drawn` has the names of the generators that the
    data set has been seen to draw from.
    """

    def __init__(
        self,
        dataset: Any,
        lock: threading.RLock | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not (dataset is None or hasattr(dataset, "fetch") or hasattr(dataset, "__getitem__")):
            raise UserError(
                f"the data set is of type {type(dataset).__name__}, which has no samples by number",
                "give a map-style data set; of a DataLoader its dataset, batch size and collate_fn",
            )
        if collate_fn is not None and hasattr(dataset, "fetch"):
            raise UserError(
                "the data set has `fetch`, which gives whole batches, and collate_fn was given too",
                "leave one of them out",
            )
        self.dataset, self.collate_fn = dataset, collate_fn
        self.lock = lock or threading.RLock()
        self.place = "a batch"
        self.drawn: set[str] = set()
        self._shared, self._own = of_process(), own(dataset)

    def read(self, indices: Indices, seed_of: Callable[[int], int]) -> Any:
        """Read a batch, while no other thread draws random numbers.

        Args:
            indices: of its samples.
            seed_of: gives the seed of the sample at a place of `indices`.

        Raises:
            UserError: a data set with `fetch`, or a collate_fn, draws random numbers. Which sample
                would get which one would depend on how the batch is cut.
            RuntimeError: the data set asks the program to end.
        """
        with self.lock:
            generators = self._generators()
            before = [generator.get() for generator in generators]
            suspects: set[str] = set()
            collating: set[str] = set()
            while True:
                try:
                    samples = self._samples(indices, seed_of, generators)
                    at_collate = [generator.get() for generator in generators]
                    batch = self._together(samples)
                    collated = self._moved(generators, at_collate)
                finally:
                    moved = self._moved(generators, before)
                    for generator, state in zip(generators, before, strict=True):
                        if generator.name in moved:
                            generator.put(state)
                if moved <= self.drawn and not collated:
                    return batch
                if collated & collating:
                    raise UserError(
                        "collate_fn draws random numbers "
                        f"({', '.join(sorted(collated & collating))}), which would depend on the "
                        "number of ranks",
                        "draw them where the data set gives one sample, in `__getitem__`",
                    )
                collating |= collated
                # Read again: it may have been some other thread. If it was the data set, its
                # samples have not been seeded.
                self.drawn |= moved & suspects
                suspects |= moved
                if self.drawn and hasattr(self.dataset, "fetch"):
                    raise UserError(
                        f"`fetch` of the data set draws random numbers ({self.sources}), which "
                        "would depend on the number of ranks",
                        "draw them where the data set gives one sample, in `__getitem__`",
                    )

    def read_beside(self, indices: Indices) -> Any:
        """Read a batch while another thread may draw random numbers, if the data set draws none.

        Raises:
            RuntimeError: the data set asks the program to end.
        """
        with self.lock:
            return self._together(self._samples(indices))

    def read_of_step(self, indices: Indices, seed: int, number: int, first: int) -> Any:
        """Read as `read`, with the seeds of samples of a step.

        Args:
            indices: of the samples.
            seed: of the sample order.
            number: of the step.
            first: place of the first sample in the step's whole batch.
        """
        return self.read(indices, lambda place: mix(seed, SAMPLE_STREAM, number, first + place))

    @property
    def sources(self) -> str:
        """The generators that the data set draws from, for a message."""
        return ", ".join(sorted(self.drawn))

    def _generators(self) -> list[Generator]:
        return self._shared + self._own + of_gpu()

    def _moved(self, generators: list[Generator], before: list[Any]) -> set[str]:
        return {
            generator.name
            for generator, state in zip(generators, before, strict=True)
            if generator.key(generator.get()) != generator.key(state)
        }

    def _samples(
        self,
        indices: Indices,
        seed_of: Callable[[int], int] | None = None,
        generators: Sequence[Generator] = (),
    ) -> Any:
        """Samples, each read with seeded generators if it draws; or what `fetch` gives."""
        used = [(n, one) for n, one in enumerate(generators) if one.name in self.drawn]
        try:
            if hasattr(self.dataset, "fetch"):
                return self.dataset.fetch(indices)
            samples = []
            for place, index in enumerate(indices):
                if used and seed_of is not None:
                    seed = seed_of(place)
                    for number, generator in used:
                        generator.seed(mix(seed, number))
                self.place = f"sample {index}"
                samples.append(self.dataset[int(index)])
            self.place = "a batch"
            return samples
        except (SystemExit, GeneratorExit) as error:  # work would be lost, with exit code 0
            raise RuntimeError(f"the data set raised {error!r}") from error

    def _together(self, samples: Any) -> Any:
        if hasattr(self.dataset, "fetch"):
            return samples
        try:
            return (self.collate_fn or default_collate)(samples)
        except (SystemExit, GeneratorExit) as error:
            raise RuntimeError(f"collate_fn raised {error!r}") from error
