"""Once in each step the ranks tell each other where they are and which gradients they have.

All ranks of an averager must call its collectives equally often and in the same order. In a plain
loop each rank decides for itself whether it takes, gives up or leaves a step, so ranks can drift
apart unnoticed: one rank's gradients would then be added to those of another step, or wait for
ever. So the ranks first tell each other where they are. If one is elsewhere, all of them raise the
same error.

Each fact is one bit, and one MPI_Iallreduce combines the bits of all ranks by a bitwise or. The
result says which facts hold for at least one rank.
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

DROPS = 24  # bits for the number of drops, which is compared modulo this


class Place(IntEnum):
    """The point in a step that a rank has come to."""

    AVERAGE = 0
    GIVE_UP = 1
    LEAVE = 2

    @property
    def words(self) -> str:
        """What the rank does there, for error messages."""
        return {
            Place.AVERAGE: "averages gradients",
            Place.GIVE_UP: "gives up a step by zero_grad",
            Place.LEAVE: "has left the step without averaging",
        }[self]


@dataclass(frozen=True)
class Facts:
    """Facts about one rank; as the result of `told`, facts that hold for at least one rank.

    Args:
        used: (parameters,) of bool, which parameters have a gradient.
        fresh: something has happened since the last average.
        failed: the rank has an error to raise.
        late: gradients came after the sum of their bucket had begun.
        changed: the optimizer has other parameters than the averager.
        restless: the rank must not begin sums before `average` in the next step.
        gone: the rank has left its loop, and takes no further step.
    """

    used: np.ndarray
    fresh: bool = True
    failed: bool = False
    late: bool = False
    changed: bool = False
    restless: bool = False
    gone: bool = False


def told(group: Group, place: Place, drops: int, facts: Facts) -> Coroutine[Facts]:
    """Tell all ranks this rank's facts and hear theirs. Collective.

    Args:
        group: the ranks, on a communicator that is used for nothing else.
        place: where this rank is.
        drops: how often it has dropped gradients since the last average.
        facts: this rank's facts.

    Returns:
        The facts that hold for at least one rank, the same on all ranks.

    Raises:
        UserError: the ranks are at different places, or have not dropped gradients equally often.
            All ranks raise it.
    """
    if group.comm is None:
        return facts
    from mpi4py import MPI  # it is running, because the group has a communicator

    # The first word has the place in bits 0 to 7, the drops in bits 8 to 31, then the flags. Place
    # and drops set one bit each: if the result has two, the ranks differ.
    first = 1 << place | 1 << (8 + drops % DROPS)
    flags = (facts.fresh, facts.failed, facts.late, facts.changed, facts.restless, facts.gone)
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
    """The error for ranks at different places, the same on all of them."""
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
    error.agreed, error.agreed_ranks = True, group.size
    return error
