"""Simulate a pipeline schedule: does it end, how long do ranks wait, how much do they hold?

A schedule is played over its data dependencies before anything is computed. FORWARD of a virtual
stage needs the FORWARD of the stage before it. BACKWARD and INPUT need the FORWARD of their own
stage and the gradient from the stage after it. WEIGHT needs the INPUT of its own stage.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from hpc_train.parallel.schedule import Action, Kind, Name, Schedule, build

TRAINING = ([Kind.FORWARD, Kind.BACKWARD], [Kind.FORWARD, Kind.INPUT, Kind.WEIGHT])
VALIDATION = ([Kind.FORWARD],)


class ScheduleError(ValueError):
    """A schedule that is not complete or does not end."""


@dataclass(frozen=True)
class Costs:
    """Times of one virtual stage's actions, in any unit. BACKWARD takes input + weight."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    communication: float = 0.0
    """Time from the end of an action until another rank has its result."""
    back: float | None = None
    """The same for gradients, which go to the virtual stage before. None takes `communication`."""

    def of(self, kind: Kind) -> float:
        """The time of one action."""
        if kind is Kind.BACKWARD:
            return self.input + self.weight
        cost: float = getattr(self, kind.value)
        return cost

    def delay(self, kind: Kind) -> float:
        """The time that an action's result takes to another rank."""
        return self.communication if kind is Kind.FORWARD or self.back is None else self.back


EQUAL = Costs()


@dataclass(frozen=True)
class Timing:
    """The result of a simulation.

    Args:
        makespan: time from the first start to the last end.
        busy: for each rank, the time in which it computes.
        peak_live: for each rank, the largest number of (micro-batch, virtual stage) pairs whose
            activations are held at once: from the start of FORWARD to the end of BACKWARD, or of
            WEIGHT.
    """

    makespan: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def bubble_formula(
    name: Name, stages: int, micro_batches: int, virtual_stages: int = 1, costs: Costs = EQUAL
) -> float:
    """The share of a step in which ranks wait, if stages are equal and communication is free.

    There are p stages, n micro-batches and v virtual stages per rank. F, B and W are the costs of
    the forward pass, the input gradient and the weight gradient. The papers that `build` names
    give, for n >= p:

    - gpipe and 1f1b: (p-1) / (n+p-1).
    - interleaved: (p-1) / (vn+p-1).
    - zero_bubble: (p-1)(F+B-W) / (n(F+B+W) + (p-1)(F+B-W)), if W is at most F and B.

    For n < p the critical path, counted in the same way, has vp+n-1 in place of vn+p-1. In
    zero_bubble, n-1 weight gradients then fill the bubble in place of p-1.
    """
    p, n, v = stages, micro_batches, virtual_stages
    if name == "zero_bubble":
        idle = (p - 1) * (costs.forward + costs.input) - (min(n, p) - 1) * costs.weight
        return idle / (n * (costs.of(Kind.FORWARD) + costs.of(Kind.BACKWARD)) + idle)
    return 1 - v * n / (v * max(n, p) + min(n, p) - 1)


def peak_live(actions: Sequence[Action], sizes: Sequence[float] | None = None) -> float:
    """The largest size of activations that a rank holds at once.

    Args:
        actions: the rank's list of actions. Only backward passes free activations.
        sizes: for each virtual stage, the size of one micro-batch's activations; by default 1.
    """
    held = peak = 0.0
    for action in actions:
        size = sizes[action.virtual_stage] if sizes else 1
        if action.kind is Kind.FORWARD:
            held += size
            peak = max(peak, held)
        elif action.kind is not Kind.INPUT:
            held -= size
    return peak


def simulate(
    schedule: Schedule, virtual_stages: int = 1, costs: Costs | Sequence[Costs] = EQUAL
) -> Timing:
    """Play a schedule. Each action starts as soon as its rank is free and its inputs are there.

    Args:
        schedule: one list of actions per rank.
        virtual_stages: number of virtual stages per rank.
        costs: one value for all virtual stages, or one for each in the model's order.

    Raises:
        ScheduleError: an action is missing, doubled or out of order, or ranks would wait for each
            other forever. The message names rank and action.
    """
    _check_complete(schedule, virtual_stages)
    stages = len(schedule)
    each = [costs] * (stages * virtual_stages) if isinstance(costs, Costs) else costs
    timeline = _Timeline(stages, each)
    waiting = [deque(actions) for actions in schedule]
    while any(waiting):
        taken = [timeline.advance(rank, actions) for rank, actions in enumerate(waiting)]
        if not any(taken):
            stuck = (f"rank {rank} before {left[0]}" for rank, left in enumerate(waiting) if left)
            raise ScheduleError(f"ranks wait for each other: {'; '.join(stuck)}")
    live = tuple(int(peak_live(actions)) for actions in schedule)
    return Timing(max(timeline.clocks), tuple(timeline.busy), live)


@functools.lru_cache(maxsize=1 << 14)
def makespan(name: Name, stages: int, micro_batches: int, costs: tuple[Costs, ...]) -> float:
    """The time that a schedule takes from the first start to the last end.

    For many micro-batches it is extrapolated from the two smaller numbers of `enough`.

    Args:
        name: the schedule's name.
        stages: number of ranks of the pipeline.
        micro_batches: number of micro-batches of a step.
        costs: the costs of each virtual stage.
    """
    virtual_stages = len(costs) // stages
    played = enough(stages, micro_batches)
    ends = [
        simulate(build(name, stages, n, virtual_stages), virtual_stages, costs).makespan
        for n in played
    ]
    if played[-1] == micro_batches:
        return ends[-1]
    slope = (ends[1] - ends[0]) / (played[1] - played[0])
    return ends[1] + (micro_batches - played[1]) * slope


def enough(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Numbers of micro-batches to play: the given one, or two smaller ones to extrapolate from.

    With both smaller numbers the schedule reaches its steady state, in which time grows linearly.
    """
    few = tuple(rounds * stages + micro_batches % stages for rounds in (3, 4))
    return few if micro_batches > few[1] else (micro_batches,)


class _Timeline:
    """The times at which ranks are free and results are there.

    A result has the key (kind, micro-batch, virtual stage).
    """

    def __init__(self, stages: int, costs: Sequence[Costs]) -> None:
        self.stages, self.costs = stages, costs
        self.clocks, self.busy = [0.0] * stages, [0.0] * stages
        self.there: dict[tuple[Kind, int, int], float] = {}

    def advance(self, rank: int, actions: deque[Action]) -> int:
        """Take a rank's actions until one has to wait. Returns the number of actions taken."""
        before = len(actions)
        while actions and (ready := self._ready(rank, actions[0])) is not None:
            action = actions.popleft()
            stage = action.virtual_stage * self.stages + rank
            cost = self.costs[stage].of(action.kind)
            self.clocks[rank] = max(self.clocks[rank], ready) + cost
            self.busy[rank] += cost
            self.there[_result(action.kind), action.micro_batch, stage] = self.clocks[rank]
        return before - len(actions)

    def _ready(self, rank: int, action: Action) -> float | None:
        """The time at which an action's inputs are on its rank; None if it is not known yet."""
        stage = action.virtual_stage * self.stages + rank
        ready = 0.0
        for kind, source in _needs(action, stage, len(self.costs)):
            end = self.there.get((kind, action.micro_batch, source))
            if end is None:
                return None
            remote = source % self.stages != rank
            ready = max(ready, end + remote * self.costs[source].delay(kind))
        return ready


def _check_complete(schedule: Schedule, virtual_stages: int) -> None:
    """Check that each rank has the actions of each micro-batch once and in a possible order."""
    every = list(chain.from_iterable(schedule))
    micro_batches = 1 + max((action.micro_batch for action in every), default=0)
    passes = TRAINING if any(action.kind is not Kind.FORWARD for action in every) else VALIDATION
    expected = set(product(range(micro_batches), range(virtual_stages)))
    for rank, actions in enumerate(schedule):
        kinds = defaultdict(list)
        for action in actions:
            kinds[action.micro_batch, action.virtual_stage].append(action.kind)
        for pair in sorted(expected | kinds.keys()):
            if pair not in expected or kinds[pair] not in passes:
                found = ", ".join(kind.value for kind in kinds[pair]) or "nothing"
                where = f"rank {rank}, micro-batch {pair[0]}, virtual stage {pair[1]}"
                raise ScheduleError(f"{where}: {found}, which is not one whole pass")


def _result(kind: Kind) -> Kind:
    """The kind of result that an action gives: BACKWARD gives the input gradient, as INPUT does."""
    return Kind.INPUT if kind is Kind.BACKWARD else kind


def _needs(action: Action, stage: int, stages: int) -> Iterator[tuple[Kind, int]]:
    """The results, (kind, virtual stage), that an action needs of its own micro-batch."""
    kind = _result(action.kind)
    if kind is Kind.WEIGHT:
        yield Kind.INPUT, stage
    elif kind is Kind.INPUT:
        yield Kind.FORWARD, stage
        if stage < stages - 1:
            yield Kind.INPUT, stage + 1
    elif stage > 0:
        yield Kind.FORWARD, stage - 1
