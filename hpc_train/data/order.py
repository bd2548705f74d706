"""The order of samples: a pure function of seed, epoch and position, never of ranks.

An epoch's order is a pseudo-random permutation that is computed where it is needed: a Feistel
network over the smallest power of four that holds all samples, applied again while its result
lies outside. Resuming anywhere costs nothing, and no table is held. Black and Rogaway, "Ciphers
with arbitrary finite domains" (CT-RSA 2002).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from hpc_train.errors import ConfigError

FEISTEL_ROUNDS = 8
POSITIONS_AT_ONCE = 512  # positions that are permuted together
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
        """Map positions, int64 from 0 to size - 1, to where the permutation sends them."""
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
            left, right = right, left ^ (_scramble(right ^ key) & mask)
        return (left << bits) | right


def _scramble(x: Words) -> Words:
    """SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SampleOrder:
    """Which samples make up which step's batch.

    Steps count from 1. An epoch has as many whole batches as there are; with shuffling, the
    samples that are left over are others in each epoch.

    Args:
        samples: number of samples in the data set.
        batch: samples per step over the whole job.
        seed: of the shuffling.
        shuffle: a new permutation in each epoch, or the data set's own order in all.

    Raises:
        ConfigError: there are fewer samples than one batch.
    """

    def __init__(self, samples: int, batch: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if samples < batch:
            raise ConfigError(
                f"a batch has {batch} samples, and the data set has {samples}",
                "use a smaller batch or more data",
            )
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self.steps_per_epoch = samples // batch
        # By part of a batch, the first of the steps that were computed at once, and their indices.
        self._ahead: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return (step - 1) // self.steps_per_epoch

    def indices(self, step: int, first: int, count: int) -> np.ndarray:
        """Data set indices, int64, of `count` samples of a step's batch from its `first` on."""
        since, ahead = self._ahead.get((first, count), (step, np.empty((0, count), np.int64)))
        if not 0 <= step - since < len(ahead):
            since, ahead = step, self._steps(step, first, count)
            self._ahead[first, count] = since, ahead
        indices: np.ndarray = ahead[step - since]
        return indices

    def _steps(self, step: int, first: int, count: int) -> np.ndarray:
        """Indices, of shape (steps, count), of a part in this step and the next ones of its epoch.

        A permutation of a few positions takes as long as one of hundreds.
        """
        within = (step - 1) % self.steps_per_epoch
        steps = min(max(1, POSITIONS_AT_ONCE // count), self.steps_per_epoch - within)
        begins = (within + np.arange(steps, dtype=np.int64)) * self.batch + first
        positions = begins[:, None] + np.arange(count, dtype=np.int64)
        if not self.shuffle:
            return positions
        return Permutation(self.samples, self.seed, self.epoch(step))(positions)
