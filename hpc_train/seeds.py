"""Makes one seed of several integers, such as a step, a sample and a rank: SplitMix64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]

MASK_64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*numbers: int) -> int:
    """Hash integers to 63 bits; similar integers give seeds of unrelated random numbers.

    The hash applies SplitMix64's finalizer to each number in turn: Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators" (OOPSLA 2014).
    """
    return _state(numbers) >> 1


def mix_each(numbers: Sequence[int], last: Sequence[int]) -> list[int]:
    """`mix(*numbers, one)` for each one of `last`, faster than one by one."""
    import numpy as np  # planning has seeds, and does not load numpy

    begin = np.uint64((_state(numbers) + GAMMA) & MASK_64)
    state = scramble(np.asarray(last, np.int64).astype(np.uint64) + begin)
    seeds: list[int] = (state >> np.uint64(1)).tolist()
    return seeds


def scramble(x: Words) -> Words:
    """SplitMix64's finalizer of each of some integers of 64 bits, in place."""
    import numpy as np

    shifted = np.empty_like(x)
    for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR)):
        x ^= np.right_shift(x, np.uint64(shift), out=shifted)
        x *= np.uint64(factor)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x


def _state(numbers: Sequence[int]) -> int:
    state = 0
    for number in numbers:
        state = (state + number + GAMMA) & MASK_64
        state = ((state ^ (state >> 30)) * FIRST_FACTOR) & MASK_64
        state = ((state ^ (state >> 27)) * SECOND_FACTOR) & MASK_64
        state ^= state >> 31
    return state
