"""What the ranks tell each other once in each step: where they are, and whose gradients there are.

An averager's ranks have to come to its collectives as often as each other, in the same order. Each
rank of a plain loop decides for itself whether a step is taken, given up or left, so they may drift
apart without a word: then a rank's gradients meet those of another step, or nobody's. So before a
rank trusts what it gets from others it tells them where it is; if one is elsewhere, all raise the
same error.

Everything is one bit per fact and one MPI_Iallreduce by bitwise or: the result says which facts
hold for at least one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.errors import UserError
from hpc_train.mpi.group import Group

DROPS = 24  # the number of drops is told modulo this


class Place(IntEnum):
    """Where in its step a rank is."""

    AVERAGE = 0
    GIVE_UP = 1
    LEAVE = 2

    @property
    def words(self) -> str:
        """For messages."""
        return {
            Place.AVERAGE: "averages gradients",
            Place.GIVE_UP: "gives up a step by zero_grad",
            Place.LEAVE: "has left the step without averaging",
        }[self]


@dataclass(frozen=True)
class Facts:
    """What is true of one rank, or, as the result, of one rank at least.

    Args:
        used: by parameter, (parameters,) of bool: it has a gradient.
        fresh: something has happened since the last average.
        failed: it has to raise an error.
        late: gradients came after the sum of their bucket had begun.
        changed: the optimizer has other parameters than the averager.
        restless: it must not begin sums before `average` in the next step.
    """

    used: np.ndarray
    fresh: bool = True
    failed: bool = False
    late: bool = False
    changed: bool = False
    restless: bool = False


def told(group: Group, place: Place, drops: int, facts: Facts) -> Coroutine[Facts]:
    """Tell all ranks, and hear from all.

    Args:
        group: the ranks, on a communicator that nothing else is used for.
        place: where this rank is.
        drops: how often it has dropped gradients since the last average.
        facts: of this rank.

    Raises:
        UserError: the ranks are at different places, or have dropped gradients unequally often; on
            all ranks.
    """
    if group.comm is None:
        return facts
    from mpi4py import MPI  # a group with a communicator has MPI

    first = 1 << place | 1 << (8 + drops % DROPS)
    flags = (facts.fresh, facts.failed, facts.late, facts.changed, facts.restless)
    first |= sum(1 << (32 + number) for number, flag in enumerate(flags) if flag)
    words = np.zeros(1 + -(-len(facts.used) // 64), np.uint64)
    words[0] = first
    bits = np.packbits(facts.used, bitorder="little")
    words[1:].view(np.uint8)[: len(bits)] = bits
    yield group.comm.Iallreduce(MPI.IN_PLACE, words, op=MPI.BOR)
    heard = int(words[0])
    if _several(heard & 0xFF) or _several(heard >> 8 & (1 << DROPS) - 1):
        raise _apart(group, group.gathered((place, drops, group.host)))
    used = np.unpackbits(words[1:].view(np.uint8), count=len(facts.used), bitorder="little")
    return Facts(used.astype(bool), *(bool(heard >> (32 + n) & 1) for n in range(len(flags))))


def _several(bits: int) -> bool:
    return bits & (bits - 1) != 0


def _apart(group: Group, found: Sequence[Any]) -> UserError:
    """The error of ranks that are not together, the same on all of them."""
    place, drops, host = found[0]
    rank = next(r for r, (p, d, _) in enumerate(found) if (p, d) != (place, drops))
    other, others, there = found[rank]
    if place != other:
        cause = f"rank 0 ({host}) {place.words}, rank {rank} ({there}) {other.words}"
    else:
        cause = (
            f"rank 0 ({host}) has dropped gradients {drops} times since the last average, "
            f"rank {rank} ({there}) {others} times"
        )
    error = UserError(
        f"the ranks take different steps: {cause}",
        "take a step on all ranks or on none, decide it by a number that all ranks have, and give "
        "a rank without samples the weight 0",
    )
    error.agreed = True
    return error
