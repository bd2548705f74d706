"""A pipeline schedule is data: for each rank, a list of actions to take one after another.

`build` makes the lists. `simulate.py` plays them and refuses those that would not end.

Rank r of p has `virtual_stages` runs of layers. Its virtual stage c is the model's run c * p + r.
In every schedule the backward passes of a virtual stage run in the order of the micro-batches, so
all schedules sum gradients in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise
from typing import Literal, get_args

Name = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class Kind(Enum):
    """The pass that an action computes, for one virtual stage and one micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"  # the whole backward pass
    INPUT = "input"  # the gradient of the virtual stage's input only
    WEIGHT = "weight"  # the weight gradients that INPUT left


@dataclass(frozen=True)
class Action:
    """One step of a rank.

    Args:
        kind: the pass to compute.
        micro_batch: number of the micro-batch, from 0.
        virtual_stage: number of the virtual stage on its rank, from 0.
    """

    kind: Kind
    micro_batch: int
    virtual_stage: int

    def __str__(self) -> str:
        where = f"micro-batch {self.micro_batch}, virtual stage {self.virtual_stage}"
        return f"{self.kind.value} of {where}"


Schedule = tuple[tuple[Action, ...], ...]  # one list per pipeline rank


@functools.cache
def build(name: Name, stages: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Make a schedule, for any number of micro-batches from 1 on.

    gpipe runs all forward passes, then all backward passes (Huang et al., "GPipe",
    https://arxiv.org/abs/1811.06965).

    1f1b alternates one forward and one backward pass, as soon as a rank has its first backward pass
    (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", PipeDream-flush,
    https://arxiv.org/abs/2006.09503).

    interleaved does the same over several virtual stages per rank, in groups of p micro-batches
    (Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", https://arxiv.org/abs/2104.04473). If p does not divide the number of
    micro-batches n, there are n // p groups, some of them larger than p.

    zero_bubble is ZB-H1: 1f1b with the backward pass split in two. Rank r computes weight gradients
    r micro-batches late. It so passes the gradient of the input on sooner, and has work left for
    the end (Qi et al., "Zero bubble pipeline parallelism", https://arxiv.org/abs/2401.10241).

    Raises:
        ValueError: the name is unknown, a number is below 1, or `virtual_stages` is above 1 with a
            schedule other than interleaved.
    """
    _check_sizes(name, stages, micro_batches, virtual_stages)
    groups = _groups(stages, micro_batches)
    forwards = tuple(_ordered(Kind.FORWARD, groups, range(virtual_stages)))
    backwards = tuple(_ordered(Kind.BACKWARD, groups, range(virtual_stages)[::-1]))
    steps = [(action,) for action in backwards]
    return tuple(
        _one_forward_one_backward(
            forwards,
            _split_backwards(micro_batches, rank) if name == "zero_bubble" else steps,
            _warm_up(name, stages, micro_batches, virtual_stages, rank),
        )
        for rank in range(stages)
    )


@functools.cache
def forward_only(stages: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Make a schedule of forward passes only, for validation. Raises as `build`."""
    _check_sizes("interleaved", stages, micro_batches, virtual_stages)
    return (
        tuple(_ordered(Kind.FORWARD, _groups(stages, micro_batches), range(virtual_stages))),
    ) * stages


def _check_sizes(name: str, stages: int, micro_batches: int, virtual_stages: int) -> None:
    if name not in get_args(Name):
        raise ValueError(f"unknown schedule {name!r}: it is one of {', '.join(get_args(Name))}")
    if min(stages, micro_batches, virtual_stages) < 1:
        sizes = f"{stages} stages, {micro_batches} micro-batches, {virtual_stages} virtual stages"
        raise ValueError(f"{sizes}: each number must be at least 1")
    if virtual_stages > 1 and name != "interleaved":
        raise ValueError(f"schedule {name} has one virtual stage per rank, not {virtual_stages}")


def _groups(stages: int, micro_batches: int) -> list[range]:
    """Groups of micro-batches that go through all virtual stages of a rank together.

    Each group has at least p micro-batches. There is no smaller group at the end: ranks would wait
    for it, and with some sizes forever. Fewer than p micro-batches are one group.
    """
    number = max(1, micro_batches // stages)
    borders = [i * micro_batches // number for i in range(number + 1)]
    return [range(*pair) for pair in pairwise(borders)]


def _ordered(kind: Kind, groups: list[range], virtual_stages: Sequence[int]) -> Iterator[Action]:
    return (
        Action(kind, m, virtual_stage)
        for group in groups
        for virtual_stage in virtual_stages
        for m in group
    )


def _split_backwards(micro_batches: int, delay: int) -> list[tuple[Action, ...]]:
    """Backward steps of ZB-H1: an input gradient, and the weight gradient of `delay` steps ago."""
    inputs, weights = (
        {m: (Action(kind, m, 0),) for m in range(micro_batches)}
        for kind in (Kind.INPUT, Kind.WEIGHT)
    )
    turns = range(micro_batches + delay)
    return [(*inputs.get(turn, ()), *weights.get(turn - delay, ())) for turn in turns]


def _warm_up(name: Name, stages: int, micro_batches: int, virtual_stages: int, rank: int) -> int:
    """The number of forward passes that a rank runs before it alternates."""
    every = micro_batches * virtual_stages
    if name == "gpipe":
        return every
    if virtual_stages == 1:
        return min(every, stages - rank - 1)
    group = max(map(len, _groups(stages, micro_batches)))
    return min(every, (virtual_stages - 1) * group + 2 * (stages - rank - 1))


def _one_forward_one_backward(
    forwards: Sequence[Action], backwards: Sequence[tuple[Action, ...]], warm_up: int
) -> tuple[Action, ...]:
    steady = zip(forwards[warm_up:], backwards, strict=False)
    alternating = chain.from_iterable((forward, *step) for forward, step in steady)
    rest = chain.from_iterable(backwards[len(forwards) - warm_up :])
    return (*forwards[:warm_up], *alternating, *rest)


def peak_live_formula(
    name: Name, stages: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[int, ...]:
    """The largest number of (micro-batch, virtual stage) pairs that each rank holds at once.

    With n micro-batches on p ranks this is n for gpipe, min(n, p - rank) for 1f1b, and min(n, p)
    for zero_bubble, as on the first rank of 1f1b. For interleaved it is one more than the number of
    forward passes before the rank's first backward pass, n x virtual_stages at most.
    """
    if name == "zero_bubble":
        return (min(micro_batches, stages),) * stages
    every = micro_batches * virtual_stages
    warm_ups = (
        _warm_up(name, stages, micro_batches, virtual_stages, rank) for rank in range(stages)
    )
    return tuple(min(every, warm_up + 1) for warm_up in warm_ups)
