"""Makes one seed of several integers, such as a step, a sample and a rank."""

from __future__ import annotations

MASK_64 = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash integers to 63 bits; similar integers give seeds of unrelated random numbers.

    The hash applies SplitMix64's finalizer to each number in turn: Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators" (OOPSLA 2014).
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
        state ^= state >> 31
    return state >> 1
