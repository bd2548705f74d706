"""What a pipeline schedule comes to: whether it ends, how long ranks wait, how much they hold.

A schedule is played over its data dependencies before anything is computed. FORWARD of a virtual
stage needs that of the stage before; BACKWARD and INPUT need their own FORWARD and the gradient
from the stage behind; WEIGHT needs its own INPUT.
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
    """A schedule that is not complete, does not end, or holds too much."""


@dataclass(frozen=True)
class Costs:
    """Time that the actions of one chunk take, in any unit; BACKWARD takes input + weight."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    communication: float = 0.0
    """From the end of an action to the start of the one on another rank that takes its result."""
    back: float | None = None
    """The same for gradients, on their way to the chunk before; None: as long."""

    def of(self, kind: Kind) -> float:
        """Time of one action."""
        if kind is Kind.BACKWARD:
            return self.input + self.weight
        cost: float = getattr(self, kind.value)
        return cost

    def delay(self, kind: Kind) -> float:
        """Time that the result of an action is on its way."""
        return self.communication if kind is Kind.FORWARD or self.back is None else self.back


EQUAL = Costs()


@dataclass(frozen=True)
class Timing:
    """What a schedule comes to.

    Args:
        makespan: time from the first start to the last end.
        busy: for each rank, time in which it computes.
        peak_live: for each rank, the largest number of (micro-batch, chunk) pairs whose activations
            are held at once: from the start of FORWARD to the end of BACKWARD, or of WEIGHT.
    """

    makespan: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def bubble_formula(
    name: Name, stages: int, micro_batches: int, chunks: int = 1, costs: Costs = EQUAL
) -> float:
    """The share of the step that ranks wait, for equal stages and free communication.

    With p stages, n >= p micro-batches, v chunks, and F, B, W the costs of forward, input gradient
    and weight gradient, from the papers that `build` names: gpipe and 1f1b wait (p-1)/(n+p-1) of
    the step, interleaved (p-1)/(vn+p-1), zero_bubble (p-1)(F+B-W) of n(F+B+W) + (p-1)(F+B-W) if W
    is at most F and B. For n < p the critical path, counted in the same way, has vp+n-1 in place of
    vn+p-1; in zero_bubble n-1 weight gradients fill the bubble, not p-1.
    """
    p, n, v = stages, micro_batches, chunks
    if name == "zero_bubble":
        idle = (p - 1) * (costs.forward + costs.input) - (min(n, p) - 1) * costs.weight
        return idle / (n * (costs.of(Kind.FORWARD) + costs.of(Kind.BACKWARD)) + idle)
    return 1 - v * n / (v * max(n, p) + min(n, p) - 1)


def peak_live(actions: Sequence[Action], sizes: Sequence[float] | None = None) -> float:
    """The most that a rank holds at once of its chunks' activations.

    Args:
        actions: the rank's list; without backward passes nothing is given back.
        sizes: what one micro-batch of each chunk takes; without them, 1.
    """
    held = peak = 0.0
    for action in actions:
        size = sizes[action.chunk] if sizes else 1
        if action.kind is Kind.FORWARD:
            held += size
            peak = max(peak, held)
        elif action.kind is not Kind.INPUT:
            held -= size
    return peak


def check_schedule(schedule: Schedule, chunks: int = 1, live: Sequence[int] | None = None) -> None:
    """Check a schedule before it runs.

    Args:
        schedule: as `build` writes it.
        chunks: virtual stages per rank.
        live: for each rank, how many (micro-batch, chunk) pairs it may hold at once.

    Raises:
        ScheduleError: as `simulate`, or a rank would hold more.
    """
    needed = simulate(schedule, chunks).peak_live
    for rank, (peak, limit) in enumerate(zip(needed, live or needed, strict=True)):
        if peak > limit:
            raise ScheduleError(f"rank {rank} would hold {peak} micro-batches, not {limit}")


def simulate(schedule: Schedule, chunks: int = 1, costs: Costs | Sequence[Costs] = EQUAL) -> Timing:
    """Play a schedule; each action starts as soon as its rank is free and what it needs is there.

    Args:
        schedule: one list of actions per rank.
        chunks: virtual stages per rank.
        costs: of every virtual stage, or one for each in the model's order; by default all 1.

    Raises:
        ScheduleError: an action is missing, doubled or out of order, or ranks would wait for each
            other for ever; it names rank and action.
    """
    _check_complete(schedule, chunks)
    stages = len(schedule)
    each = [costs] * (stages * chunks) if isinstance(costs, Costs) else costs
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
    """Time of a schedule. Of a long one only the start is played, and one micro-batch more.

    Args:
        name: of the schedule.
        stages: ranks of the pipeline.
        micro_batches: of a step.
        costs: of each virtual stage.
    """
    chunks = len(costs) // stages
    played = enough(stages, micro_batches)
    ends = [simulate(build(name, stages, n, chunks), chunks, costs).makespan for n in played]
    if played[-1] == micro_batches:
        return ends[-1]
    slope = (ends[1] - ends[0]) / (played[1] - played[0])
    return ends[1] + (micro_batches - played[1]) * slope


def enough(stages: int, micro_batches: int) -> tuple[int, ...]:
    """How many micro-batches show what a step takes: all, or two numbers in its steady state."""
    few = tuple(rounds * stages + micro_batches % stages for rounds in (3, 4))
    return few if micro_batches > few[1] else (micro_batches,)


class _Timeline:
    """When each rank is free, and when each result (what, micro-batch, virtual stage) is there."""

    def __init__(self, stages: int, costs: Sequence[Costs]) -> None:
        self.stages, self.costs = stages, costs
        self.clocks, self.busy = [0.0] * stages, [0.0] * stages
        self.there: dict[tuple[Kind, int, int], float] = {}

    def advance(self, rank: int, actions: deque[Action]) -> int:
        """Take a rank's actions until one has to wait; returns how many."""
        before = len(actions)
        while actions and (ready := self._ready(rank, actions[0])) is not None:
            action = actions.popleft()
            stage = action.chunk * self.stages + rank
            cost = self.costs[stage].of(action.kind)
            self.clocks[rank] = max(self.clocks[rank], ready) + cost
            self.busy[rank] += cost
            self.there[_result(action.kind), action.micro_batch, stage] = self.clocks[rank]
        return before - len(actions)

    def _ready(self, rank: int, action: Action) -> float | None:
        """When what an action needs is on its rank; None if nobody knows yet."""
        stage = action.chunk * self.stages + rank
        ready = 0.0
        for kind, source in _needs(action, stage, len(self.costs)):
            end = self.there.get((kind, action.micro_batch, source))
            if end is None:
                return None
            remote = source % self.stages != rank
            ready = max(ready, end + remote * self.costs[source].delay(kind))
        return ready


def _check_complete(schedule: Schedule, chunks: int) -> None:
    """Check that each rank has each micro-batch's actions once, in an order that can be."""
    every = list(chain.from_iterable(schedule))
    micro_batches = 1 + max((action.micro_batch for action in every), default=0)
    passes = TRAINING if any(action.kind is not Kind.FORWARD for action in every) else VALIDATION
    expected = set(product(range(micro_batches), range(chunks)))
    for rank, actions in enumerate(schedule):
        kinds = defaultdict(list)
        for action in actions:
            kinds[action.micro_batch, action.chunk].append(action.kind)
        for pair in sorted(expected | kinds.keys()):
            if pair not in expected or kinds[pair] not in passes:
                found = ", ".join(kind.value for kind in kinds[pair]) or "nothing"
                where = f"rank {rank}, micro-batch {pair[0]}, chunk {pair[1]}"
                raise ScheduleError(f"{where}: {found}, which is not one whole pass")


def _result(kind: Kind) -> Kind:
    """What others wait for: both backward actions give the gradient of the input."""
    return Kind.INPUT if kind is Kind.BACKWARD else kind


def _needs(action: Action, stage: int, stages: int) -> Iterator[tuple[Kind, int]]:
    """The results of the same micro-batch, (what, virtual stage), that an action needs."""
    kind = _result(action.kind)
    if kind is Kind.WEIGHT:
        yield Kind.INPUT, stage
    elif kind is Kind.INPUT:
        yield Kind.FORWARD, stage
        if stage < stages - 1:
            yield Kind.INPUT, stage + 1
    elif stage > 0:
        yield Kind.FORWARD, stage - 1
