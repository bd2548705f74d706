"""Other samples in place of damaged ones, the same on every layout.

Which sample stands in for a damaged one depends on the two samples' numbers and on which samples
are damaged, and not on ranks, batches or threads.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.data.check import check_shard
from hpc_train.data.manifest import Manifest, Shard
from hpc_train.errors import DataError, plural
from hpc_train.seeds import mix

MOST_DRAWS = 64  # most samples that are looked at in place of one
MOST_SUBSTITUTED = 0.1  # largest share of samples that may be substituted
COPY_AGAIN = "copy the damaged files again, or prepare the data again"

logger = logging.getLogger(__name__)


class Substituted(tuple[Any, ...]):
    """The tuple of a batch in which samples stand in for damaged ones.

    The attribute `pairs` has the number of each damaged sample and that of its substitute, in the
    batch's order. `causes` says what is wrong with the damaged samples.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    causes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, batch: tuple[Any, ...], pairs: Iterable[tuple[int, int]], causes: Iterable[str]
    ) -> Substituted:
        """A batch with these attributes."""
        made = cls(batch)
        made.pairs, made.causes = tuple(pairs), tuple(causes)
        return made


class Substitutes:
    """The damaged samples of a data set that this process knows, and what stands in for them.

    In place of a damaged sample one is drawn from the whole data set, by its number alone. If that
    is damaged, too, another one is drawn. A damaged sample is looked at again when it is wanted
    again: the file system may have been at fault, on this rank alone. Copies of the data set for
    other threads share this object; a copy for a worker process has one of its own.

    Args:
        samples: number of samples in the data set.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._damaged: set[int] = set()  # the samples that could not be read at the last look
        self._told: dict[str, object] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Substitutes:
        return self

    def fetch(
        self, wanted: np.ndarray, read: Callable[[np.ndarray], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """Read samples, or others in their place.

        Args:
            wanted: the numbers of the samples, int64 (N,).
            read: returns a batch of the samples of some numbers, or raises a `DataError` if one of
                them is damaged.

        Raises:
            DataError: MOST_DRAWS samples in place of one are damaged, too.
        """
        causes: dict[int, str] = {}  # what is wrong with each sample that cannot be read now
        again = False
        while True:
            taken = self._taken(wanted, causes)
            # They alone are looked at first, as a batch of sound samples is read in one go.
            if known := self._damaged.intersection(taken.tolist()):
                self._look(np.array(list(known)), read, causes)
                continue
            try:
                batch = read(taken)
                break
            except DataError:
                # All may be sound now, if the file system was at fault.
                if not self._look(taken, read, causes) and again:
                    raise
                again = True
        places = np.flatnonzero(taken != wanted)
        if not places.size:
            return batch
        numbers = wanted[places].tolist()
        pairs = zip(numbers, taken[places].tolist(), strict=True)
        return Substituted.of(batch, pairs, dict.fromkeys(causes[n] for n in numbers))

    def _taken(self, wanted: np.ndarray, causes: Mapping[int, str]) -> np.ndarray:
        """The samples to read: those that have no cause of damage, and substitutes."""
        if not causes:
            return wanted
        numbers = (self._substitute(n, causes) if n in causes else n for n in wanted.tolist())
        return np.fromiter(numbers, np.int64, len(wanted))

    def _substitute(self, number: int, causes: Mapping[int, str]) -> int:
        for draw in range(MOST_DRAWS):
            found = mix(number, draw) % self.samples
            if found not in causes:
                return found
        raise DataError(
            f"{causes[number]}, and {MOST_DRAWS} samples that could stand in for a sample of it "
            "are damaged, too",
            COPY_AGAIN,
        )

    def _look(
        self,
        taken: np.ndarray,
        read: Callable[[np.ndarray], tuple[Any, ...]],
        causes: dict[int, str],
    ) -> bool:
        """Read samples one by one, so that each is judged alone. Returns whether one is damaged.

        `causes` takes what is wrong with each damaged one.
        """
        damaged = False
        for number in np.unique(taken).tolist():
            try:
                read(np.array([number]))
                self._damaged.discard(number)
            except DataError as error:
                causes[number] = error.cause
                self._damaged.add(number)
                if multiprocessing.parent_process() is None:  # else the rank tells it (`Processes`)
                    self.tell([error.cause])
                damaged = True
        return damaged

    def tell(self, causes: Iterable[str]) -> None:
        """Warn of each kind of damage that this object was not told of before."""
        for cause in causes:
            mine = object()
            if self._told.setdefault(cause, mine) is mine:  # of several threads one is first
                logger.warning("%s; other samples stand in for those in it", cause)


def unfit_shards(directory: Path, manifest: Manifest, shards: Iterable[Shard]) -> dict[str, str]:
    """What `check_shard` finds wrong with some shards, by name."""
    unfit = {}
    for shard in shards:
        try:
            check_shard(directory / shard.name, shard, manifest.dtype)
        except DataError as error:
            unfit[shard.name] = error.cause
    return unfit


def check_unfit_share(directory: Path, manifest: Manifest, unfit: Mapping[str, str]) -> None:
    """Check that few enough tokens are in shards that cannot be used.

    Raises:
        DataError: of a split, the share of tokens in such shards is above MOST_SUBSTITUTED.
    """
    for split, shards in manifest.splits.items():
        causes = [unfit[shard.name] for shard in shards if shard.name in unfit]
        lost = sum(shard.tokens for shard in shards if shard.name in unfit)
        if lost > MOST_SUBSTITUTED * manifest.tokens(split):
            raise DataError(
                f"{lost} of {plural(manifest.tokens(split), 'token')} of split {split} of "
                f"{directory} are in {plural(len(causes), 'shard')} that cannot be used "
                f"({causes[0]}), and samples are substituted for {MOST_SUBSTITUTED:.0%} at most",
                COPY_AGAIN,
            )
