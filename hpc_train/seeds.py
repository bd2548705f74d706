"""Makes one seed of several integers, such as a step, a sample and a rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASK_64 = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash integers to 63 bits; similar integers give seeds of unrelated random numbers.

    The hash applies SplitMix64's finalizer to each number in turn: Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators" (OOPSLA 2014).
    """
    return _hashed(*numbers) >> 1


def mix_each(*numbers: int, each: Sequence[int]) -> list[int]:
    """`mix(*numbers, one)` for each one of some integers from 0, computed together."""
    with np.errstate(over="ignore"):  # integers of 64 bits wrap around, as they are meant to
        begin = np.uint64((_hashed(*numbers) + 0x9E3779B97F4A7C15) & MASK_64)
        state = np.asarray(each, np.uint64) + begin
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: list[int] = ((state ^ (state >> np.uint64(31))) >> np.uint64(1)).tolist()
    return found


def _hashed(*numbers: int) -> int:
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
        state ^= state >> 31
    return state
