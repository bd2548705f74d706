"""Reads batches of any data set, and ties the random numbers that it draws to the samples.

A data set may draw from generators that the whole process shares. Their numbers depend on all that
was drawn before: on the rank, on earlier batches, and on where a run was resumed. So if a data set
draws, the reader seeds the generators before each sample, and restores them after the batch. The
model then draws the same numbers as if nothing had been read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from hpc_train.data.generators import Generator, of_gpu, of_process, own, seedings
from hpc_train.data.leaves import leaves
from hpc_train.data.methods import fetch_of, gives_several
from hpc_train.data.mixture import Mixture, datasets_in
from hpc_train.errors import ReadNote, UserError, error_in_words, plural
from hpc_train.seeds import mix

logger = logging.getLogger(__name__)

Indices = Sequence[int] | np.ndarray
SAMPLE_STREAM = 1  # part of the samples' seeds, so that they differ from the model's
FAILURES = 3  # of `__getitems__` in a row, after which it is not called again; one may pass
ENDING = (SystemExit, GeneratorExit, StopIteration)
"""After these the job would end with exit code 0, or an iterator that reads would seem to end."""


class Reader:
    """Reads from one data set, in one thread at a time.

    Args:
        dataset: either has `dataset.fetch(indices)`, which returns a batch, or is a map-style data
            set of torch. Then `dataset[i]` returns a sample, and torch's `default_collate` makes
            the batch. A method `__getitems__` of its class returns a list of samples. A class below
            with a `__getitem__` of its own has neither.
        lock: held while the reader reads. Readers whose data sets share state share a lock.
        collate_fn: makes a batch of a list of samples, in place of `default_collate`.

    Raises:
        UserError: the data set has no samples by number, or has `fetch` and a collate_fn was given.

    The attribute `place` says what was read last, for messages. `drawn` has the names of the
    generators that the data set was seen to draw from, or to seed. `may_draw` is False only if the
    data set is known to draw no random numbers.
    """

    def __init__(
        self,
        dataset: Any,
        lock: threading.RLock | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        check_by_number(dataset)
        if collate_fn is not None and fetch_of(dataset) is not None:
            raise UserError(
                "the data set has `fetch`, which returns whole batches, so it takes no collate_fn",
                "leave one of them out",
            )
        self.dataset, self.collate_fn = dataset, collate_fn
        self.may_draw = collate_fn is not None or _may_draw(dataset)
        self.lock = lock or threading.RLock()
        self.place = "a batch"
        self.drawn: set[str] = set()
        self._gives_several = gives_several(dataset)
        self._failures, self._told = 0, False  # of `__getitems__`, in a row
        self._fetch = fetch_of(dataset)
        if collate_fn is None and _is_plain(dataset):
            self._fetch = self._rows
        self._shared = of_process()
        self._own: list[Generator] | None = None  # until the first batch is read
        self._compared = False

    def read(self, indices: Indices, seed_of: Callable[[int], int]) -> Any:
        """Read a batch. No other thread may draw random numbers meanwhile.

        Args:
            indices: the samples to read.
            seed_of: maps a position in `indices` to the seed of the sample there.

        Raises:
            UserError: a data set with `fetch`, or a collate_fn, draws random numbers. They would
                depend on how the batch is cut.
            RuntimeError: the data set raised one of ENDING.
        """
        if not self.may_draw:
            return self.read_beside(indices)
        with self.lock:
            if self._own is not None:
                return self._read(indices, seed_of)
            self._wake()
            self._own = before = self._found()
            batch = self._read(indices, seed_of)
            self._own = self._found()  # they may be made in the first samples or the first batch
            return batch if len(self._own) == len(before) else self._read(indices, seed_of)

    def _wake(self) -> None:
        """Read a sample of each data set of a mixture: it may make its generators in its first one.

        Else the samples of this rank would decide which generators the first batch finds.
        """
        if not isinstance(self.dataset, Mixture):
            return  # its first batch does it
        there = [*self._shared, *self._found(), *of_gpu()]
        states = [generator.get() for generator in there]
        for one in filter(_may_draw, datasets_in(self.dataset)):
            with suppress(Exception):  # if training needs the sample, it raises again
                one[0]
        for generator, state in zip(there, states, strict=True):
            generator.put(state)

    def _found(self) -> list[Generator]:
        holders = [*datasets_in(self.dataset), self.collate_fn]
        return [found for one in holders for found in own(one)]

    def _read(self, indices: Indices, seed_of: Callable[[int], int]) -> Any:
        generators = self._generators()
        before = [generator.get() for generator in generators]
        suspects: set[str] = set()
        collating: set[str] = set()
        while True:
            try:
                with seedings() as seeded:
                    batch, collated = self._batch(indices, seed_of, generators)
            finally:
                moved = self._moved(generators, before)
                for generator, state in zip(generators, before, strict=True):
                    if generator.name in moved:
                        generator.put(state)
            touched = moved | seeded
            if touched <= self.drawn and not collated:
                return batch
            if collated & collating:
                raise UserError(
                    "collate_fn draws random numbers "
                    f"({', '.join(sorted(collated & collating))}), which would depend on the "
                    "number of ranks",
                    "draw them where the data set gives one sample, in `__getitem__`",
                )
            collating |= collated
            # Read again. If another thread drew, its draws will not repeat. If the data set
            # drew, its samples had no seeds yet.
            self.drawn |= touched & suspects
            suspects |= touched
            if moved & self.drawn and self._fetch is not None:
                raise UserError(
                    f"`fetch` of the data set draws random numbers ({self.sources}), which "
                    "would depend on the number of ranks",
                    "draw them where the data set gives one sample, in `__getitem__`",
                )

    def _batch(
        self, indices: Indices, seed_of: Callable[[int], int], generators: list[Generator]
    ) -> tuple[Any, set[str]]:
        """A batch, and the names of the generators that collate_fn has drawn from."""
        samples = self._samples(indices, seed_of, generators)
        if self.collate_fn is None:
            return self._together(samples), set()
        before = [generator.get() for generator in generators]
        batch = self._together(samples)
        return batch, self._moved(generators, before)

    def read_beside(self, indices: Indices) -> Any:
        """Read a batch of a data set that draws no random numbers. Other threads may draw some.

        Raises:
            RuntimeError: the data set raised one of ENDING.
        """
        with self.lock:
            return self._together(self._samples(indices))

    def read_of_step(self, indices: Indices, seed: int, number: int, places: Sequence[int]) -> Any:
        """Read a batch like `read`, with seeds that depend on the step and the sample's position.

        Args:
            indices: the samples to read.
            seed: the seed of the sample order.
            number: the step's number.
            places: the samples' positions in the step's whole batch.
        """

        def seed_of(item: int) -> int:
            return mix(seed, SAMPLE_STREAM, number, places[item])

        batch = self.read(indices, seed_of)
        # One rank looks, at the first batch.
        look = self.may_draw and not self._compared and len(places) and places[0] == 0
        self._compared = True
        if look and not _same(batch, self.read(indices, seed_of)):
            logger.warning(
                "two reads of the same samples gave different values, so losses may depend "
                "on the number of ranks and on resumes: keep random generators as attributes of "
                "the data set, and let its samples depend on nothing else that changes"
            )
        return batch

    @contextmanager
    def naming(self, of: str) -> Iterator[None]:
        """Let an error in reading name the sample and what it belongs to, such as "step 3"."""
        try:
            yield
        except BaseException as error:
            with suppress(Exception):  # a user's own error may refuse notes
                error.add_note(ReadNote(f"{self.place} of {of}"))
            raise

    @property
    def sources(self) -> str:
        """The generators that the data set draws from, for a message."""
        return ", ".join(sorted(self.drawn))

    def _generators(self) -> list[Generator]:
        return self._shared + (self._own or []) + of_gpu()

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
        """Read a list of samples, or a batch from `fetch`. Seeds the generators that are drawn."""
        used = [(n, one) for n, one in enumerate(generators) if one.name in self.drawn]
        try:
            if self._fetch is not None:
                return self._fetch(indices)
            numbers = [int(index) for index in indices]
            if self._gives_several and not used:
                return self._several(numbers)
            return self._singly(numbers, seed_of, used)
        except ENDING as error:
            raise RuntimeError(f"the data set raised {error!r}") from error

    def _several(self, numbers: list[int]) -> Any:
        """A list of samples from `__getitems__`. If that fails, single ones tell which cannot."""
        try:
            samples = self.dataset.__getitems__(numbers)
        except Exception as error:  # noqa: BLE001  # whatever somebody's data set raises
            failure = error
        else:
            self._failures = 0
            # With a collate_fn of its own it may return anything, such as a batch.
            listed = self.collate_fn is None or isinstance(samples, list)
            if listed and hasattr(samples, "__len__") and len(samples) != len(numbers):
                raise UserError(
                    f"`__getitems__` of the data set gave {plural(len(samples), 'sample')} for "
                    f"{plural(len(numbers), 'number')}",
                    "let it give one for each",
                )
            return samples
        try:
            singly = self._singly(numbers, None, [])
        except NotImplementedError:  # as of torch's Dataset: there are no single ones
            self.place = "a batch"
            raise failure from None
        except Exception as error:
            raise error from failure
        self._failures += 1
        self._gives_several = self._failures < FAILURES
        if not self._told:
            self._told = True
            logger.warning(
                "`__getitems__` of the data set fails (%s), so samples are read one by one: for "
                "the rest of the run if it fails %d times in a row",
                error_in_words(failure),
                FAILURES,
            )
        return singly

    def _singly(
        self,
        numbers: list[int],
        seed_of: Callable[[int], int] | None,
        used: Sequence[tuple[int, Generator]],
    ) -> list[Any]:
        samples = []
        for place, index in enumerate(numbers):
            if used and seed_of is not None:
                seed = seed_of(place)
                for stream, generator in used:
                    generator.seed(mix(seed, stream))
            self.place = f"sample {index}"
            samples.append(self.dataset[index])
        self.place = "a batch"
        return samples

    def _together(self, samples: Any) -> Any:
        if self._fetch is not None:
            return samples
        try:
            return (self.collate_fn or default_collate)(samples)
        except ENDING as error:
            raise RuntimeError(f"collate_fn raised {error!r}") from error
        except RuntimeError as error:
            if self.collate_fn is not None or "equal size" not in str(error):
                raise
            raise UserError(
                f"samples of unequal sizes do not make a batch ({error})",
                "give a collate_fn that pads, or let the data set pad its samples",
            ) from error

    def _rows(self, indices: Indices) -> list[Tensor]:
        """A batch of a TensorDataset, as `default_collate` makes it, but in one piece."""
        rows = torch.as_tensor(indices)
        return [tensor[rows] for tensor in self.dataset.tensors]


def _same(one: Any, other: Any) -> bool:
    """Whether two batches have the same values. What cannot be compared counts as the same."""
    ours, theirs = leaves(one), leaves(other)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(a: Any, b: Any) -> bool:
    with suppress(Exception):  # somebody's types, or tensors of special layouts
        if isinstance(a, (Tensor, np.ndarray)):
            same = (a == b) | ((a != a) & (b != b))  # NaN is like NaN
            return a.shape == b.shape and bool(same.all())
        if isinstance(a, (int, float, complex, str, bytes)):
            return bool(a == b or a != a)
    return getattr(a, "shape", None) == getattr(b, "shape", None)


def check_by_number(dataset: Any) -> None:
    """Check that a data set has samples by number; None is none.

    Raises:
        UserError: it has not.
    """
    for one in datasets_in(dataset):
        if isinstance(one, Mapping) and isinstance(name := next(iter(one), None), str):
            raise UserError(
                f"the data set is a {type(one).__name__}, a mapping of several by their names",
                f"pick one of them, such as the one named {name!r}",
            )
    if stream := [one for one in datasets_in(dataset) if not _is_by_number(one)]:
        raise UserError(
            f"the data set is of type {type(stream[0]).__name__}, which has no samples by number",
            "give a map-style data set; if you have a DataLoader, give its dataset, batch size "
            "and collate_fn",
        )


def _is_by_number(dataset: Any) -> bool:
    # An IterableDataset has `__getitem__` of torch's Dataset, which always fails.
    by_number = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return dataset is None or by_number or fetch_of(dataset) is not None


def _is_plain(dataset: Any) -> bool:
    """Whether a data set is a TensorDataset whose tensors are row-major, as batches are."""
    return type(dataset) is TensorDataset and all(
        type(one) is Tensor and one.layout is torch.strided and one.is_contiguous()
        for one in dataset.tensors
    )


def _may_draw(dataset: Any) -> bool:
    if type(dataset) is TensorDataset:
        return False
    if type(dataset) is Mixture:
        return any(map(_may_draw, dataset.datasets))
    # What a class says does not hold for the classes that others derive from it.
    return bool(vars(type(dataset)).get("draws_random_numbers", True))
