"""The order of samples: a pure function of seed, epoch and position, never of ranks.

An epoch's order is a pseudo-random permutation. Each value of it is computed when it is needed, by
a Feistel network over the smallest power of four that holds all samples. The network is applied
again while its result is not a sample. So no table is kept, and resuming anywhere costs nothing.
The method is from Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002).
`SampleOrder` says how blocks of samples are shuffled.
"""

from __future__ import annotations

import hashlib
import operator
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hpc_train.errors import ConfigError, UserError, plural
from hpc_train.seeds import mix, scramble

FEISTEL_ROUNDS = 8
SHUFFLED_TOGETHER = (
    1 << 20
)  # number of samples that are shuffled together where blocks are shuffled
POSITIONS_AT_ONCE = 4096  # number of positions that are permuted together
Words = npt.NDArray[np.uint64]


class Permutation:
    """A permutation of range(size).

    Args:
        size: number of elements, at most 2**62.
        seed, epoch: choose the permutation.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self.half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
        self.keys = np.frombuffer(key, "<u8")

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Permute positions: int64 from 0 to size - 1, of any shape. Returns the same shape."""
        values = self._encrypt(positions.astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._encrypt(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _encrypt(self, values: Words) -> Words:
        bits = np.uint64(self.half_bits)
        mask = np.uint64((1 << self.half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self.keys:
            left, right = right, left ^ (scramble(right ^ key) & mask)
        return (left << bits) | right


def evenly(samples: int, most: int) -> range | tuple[int, ...]:
    """The numbers of at most `most` samples, evenly spread over all; with 0 all numbers."""
    if not 0 < most < samples:
        return range(samples)
    return tuple(place * samples // most for place in range(most))


def number_of_samples(dataset: Any) -> int:
    """The number of samples of a data set.

    Raises:
        UserError: the data set has none that `len` returns.
    """
    try:
        return len(dataset)
    except Exception as error:
        raise UserError(
            f"len() of the data set, of type {type(dataset).__name__}, fails "
            f"({type(error).__name__}: {error})",
            "give a map-style data set, which has `__len__` and `__getitem__`",
        ) from error


def samples_said(dataset: Any, name: str) -> int:
    """The number of samples that a data set says in an attribute.

    Raises:
        ConfigError: it is no number above 0.
    """
    found = getattr(dataset, name, None)
    number = _whole(found)
    if number is None or number < 1:
        raise ConfigError(f"{name} of the data set is {found!r}", "make it a number of samples")
    return number


def _whole(value: Any) -> int | None:
    """A whole number, such as one of NumPy's, as Python's; None if it is none."""
    with suppress(TypeError):
        return int(operator.index(value))
    return None


def shuffles(shuffle: Any) -> bool:
    """Whether a value of `shuffle` asks for any shuffling.

    Raises:
        ConfigError: it is none of True, False and "full".
    """
    if shuffle not in (True, False, "full"):
        raise ConfigError(f"shuffle is {shuffle!r}", 'give True, False or "full"')
    return bool(shuffle)


class SampleOrder:
    """Says which samples each step's batch has.

    Steps are counted from 1. An epoch consists of whole batches, and leaves out the samples that
    do not fill one. With shuffling these are other samples in each epoch.

    A full shuffle takes every sample from anywhere. A data set that is stored in blocks is shuffled
    so that a block is read by few ranks, and only for a while: an epoch permutes the blocks, cuts
    them into windows of `together` samples, and permutes the samples of each window. A
    step's samples are then sorted. So a rank, whose share of every batch lies at the same place,
    reads from the same blocks for a whole window. A data set of one window is shuffled in full.

    Args:
        samples: number of samples in the data set.
        batch: number of samples per step over the whole job.
        seed: seed of the shuffling.
        shuffle: whether each epoch has a permutation of its own; if not, all epochs have the data
            set's order.
        block: number of consecutive samples that are stored together; 1 gives a full shuffle.
        together: number of samples in a window; by default SHUFFLED_TOGETHER.

    Raises:
        ConfigError: the data set has fewer samples than a batch, or the seed is no whole number.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        block: int = 1,
        together: int | None = None,
    ) -> None:
        if samples < batch:
            raise ConfigError(
                f"a batch has {plural(batch, 'sample')}, and the data set has {samples}",
                "use a smaller batch or more data",
            )
        whole = _whole(seed)
        if whole is None:
            raise ConfigError(f"the seed is {seed!r}", "give a whole number")
        self.samples = samples
        self.batch = batch
        self.seed = whole
        self.shuffle = shuffle
        self.block = min(block, samples)
        self.together = together or SHUFFLED_TOGETHER
        self.steps_per_epoch = samples // batch
        self.at_once = POSITIONS_AT_ONCE
        # Maps (first, count) to the first of the steps computed together, and to their indices.
        self._ahead: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    @classmethod
    def of(
        cls, dataset: Any, batch: int, *, seed: int = 0, shuffle: bool | Literal["full"] = True
    ) -> SampleOrder:
        """The order for a data set, by blocks if it has an attribute `samples_per_block`.

        It may also have `samples_together`, the argument `together`. With shuffle "full" neither
        counts. A data set with a method `sample_order`, such as `Mixture`, makes the order itself.
        The method takes what this one takes, but for the data set.

        Raises:
            ConfigError: as `SampleOrder` raises it, or an attribute is no number of samples, or
                shuffle is none of True, False and "full".
            UserError: the data set has no number of samples.
        """
        if hasattr(dataset, "sample_order"):
            made: SampleOrder = dataset.sample_order(batch, seed=seed, shuffle=shuffle)
            return made
        block, together = 1, None
        if shuffle != "full" and hasattr(dataset, "samples_per_block"):
            block = samples_said(dataset, "samples_per_block")
            if getattr(dataset, "samples_together", None) is not None:
                together = samples_said(dataset, "samples_together")
        every, samples = shuffles(shuffle), number_of_samples(dataset)
        return cls(samples, batch, seed=seed, shuffle=every, block=block, together=together)

    @property
    def by_blocks(self) -> bool:
        """Whether blocks are shuffled. The samples of a step are then sorted."""
        return self.shuffle and self.block > 1

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the order besides seed, batch, shuffle, and number of samples."""
        if not self.by_blocks:
            return {}
        found = {"samples per block": self.block}
        if self.together != SHUFFLED_TOGETHER:
            found["samples shuffled together"] = self.together
        return found

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return (step - 1) // self.steps_per_epoch

    def drawn(self, step: int) -> list[int]:
        """The samples that each data set of a mixture has given up to a step. Else it is empty."""
        return []

    def indices(self, step: int, first: int, count: int) -> np.ndarray:
        """Indices in the data set, int64 (count,), of the samples from `first` on of a batch."""
        if self.by_blocks:  # only the whole batch can be sorted
            return self._computed(step, 0, self.batch)[first : first + count]
        return self._computed(step, first, count)

    def _computed(self, step: int, first: int, count: int) -> np.ndarray:
        since, ahead = self._ahead.get((first, count), (step, np.empty((0, count), np.int64)))
        if not 0 <= step - since < len(ahead):
            since, ahead = step, self._steps(step, first, count)
            self._ahead[first, count] = since, ahead
        indices: np.ndarray = ahead[step - since]
        return indices

    def _steps(self, step: int, first: int, count: int) -> np.ndarray:
        """Indices of a part of the batch, (steps, count), in this and the next steps of its epoch.

        Permuting a few positions takes as long as permuting hundreds, so steps are computed ahead.
        """
        within = (step - 1) % self.steps_per_epoch
        steps = min(max(1, self.at_once // count), self.steps_per_epoch - within)
        begins = (within + np.arange(steps, dtype=np.int64)) * self.batch + first
        positions = begins[:, None] + np.arange(count, dtype=np.int64)
        found = self.at(self.epoch(step), positions)
        return self._sorted(found) if self.by_blocks else found

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The samples at some positions of an epoch, unsorted: int64, of the same shape."""
        if not self.shuffle:
            return positions
        if self.block == 1:
            return Permutation(self.samples, self.seed, epoch)(positions)
        return self._in_windows(positions, epoch)

    def _sorted(self, found: np.ndarray) -> np.ndarray:
        """The samples of whole batches, (steps, batch), each batch sorted."""
        return np.sort(found, axis=1)

    def _in_windows(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """The samples at some positions of an epoch: a permutation, of the same shape.

        Blocks are permuted, but for the samples behind the last whole block. These come behind a
        number of blocks that is another one in each epoch.
        """
        blocks, tail = divmod(self.samples, self.block)
        whole = blocks * self.block
        found = positions.copy()
        windows = positions // self.together
        for window in range(windows.min(), windows.max() + 1):
            begin = window * self.together
            size = min(self.together, self.samples - begin)
            inside = windows == window
            seed = mix(self.seed, window)
            found[inside] = begin + Permutation(size, seed, epoch)(positions[inside] - begin)
        tail_at = mix(self.seed, epoch) % (blocks + 1) * self.block
        in_tail = (found >= tail_at) & (found < tail_at + tail)
        found = np.where(in_tail, found - tail_at, found - np.where(found < tail_at, 0, tail))
        block = Permutation(blocks, self.seed, epoch)(found // self.block)
        return np.where(in_tail, whole + found, block * self.block + found % self.block)
