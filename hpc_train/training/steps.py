"""The boundary between two steps: fetch, agree, stop, save. Every training loop runs over it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial

from hpc_train.checkpoint import Checkpoints
from hpc_train.data.loader import GivenUp, Loader, Step
from hpc_train.errors import ConfigError, Stopped
from hpc_train.job.heartbeat import Heartbeat, Pace, restarts
from hpc_train.job.preemption import StopRequests
from hpc_train.monitoring.meter import Meter
from hpc_train.training.saving import Saving


def guarded_steps(
    loader: Loader,
    checkpoints: Checkpoints,
    stop: StopRequests,
    saving: Saving,
    pace: Pace,
    meter: Meter | None = None,
    taken: Callable[[int], int] = lambda step: step,
) -> Iterator[Step]:
    """Deliver the loader's steps, each of which the caller computes before the next. Collective.

    A batch that one rank cannot read is an error on all. A stop request of any rank makes all save
    the last finished step and raise. Checkpoints are written when they are due and at the end.

    Args:
        loader: of the steps that are left.
        checkpoints: hold the state; their group is all ranks of the job.
        stop: collects the reasons to stop.
        saving: knows when to save.
        pace: knows how long a rank may wait for another within a step.
        meter: is told how long batches are waited for.
        taken: of the last step that was delivered: the last one that was taken; 0: none.

    Raises:
        Stopped: a signal or the time limit.
        ClaimError: another job has taken the directory.
        ConfigError: the time limit leaves no time for a single step.
        HpcTrainError: reading or saving failed.
    """
    group = checkpoints.group
    steps = iter(loader)
    done = loader.steps.start - 1
    heartbeat = Heartbeat(group)
    heartbeat.tell(done, pace.until(done + 1, save_seconds=0.0))
    saving.limited = stop.limited
    begin = time.monotonic()
    for done in range(loader.steps.start - 1, loader.steps.stop - 1):
        asked = time.monotonic()
        needed = pace.longest + saving.reserve(checkpoints)
        loader.give_up = partial(_asked_to_stop, stop, needed)
        step, failure = _fetched(steps)
        if failure is None and checkpoints.claim is not None:
            failure = checkpoints.claim.lost()
        if meter is not None:
            meter.data_seconds += time.monotonic() - asked
        untried = saving.untried and done > loader.steps.start - 1
        # One agreement on all: at each one the ranks wait for the slowest of them.
        reason = stop.agree(group, needed, failure, untried=untried)
        if stop.soon:
            saving.now(checkpoints, taken(done))
            # Whoever has given up a batch for the time left has none to go on with.
            now_needed = pace.longest + saving.reserve(checkpoints)
            reason = stop.agree(group, needed if step is None else now_needed)
        if reason:
            # What was started again shortly before its end has done its part in the time before.
            first = done == loader.steps.start - 1 and not restarts()
            if first and reason.startswith("time_limit"):
                raise ConfigError(f"{reason} is over before the first step", "give more time")
            saving.last(checkpoints, taken(done))
            if stop.ended:
                return
            raise Stopped(taken(done), reason)
        assert step is not None  # else its failure was raised, or it was given up for the reason
        try:
            group.waiting.limit = pace.within(step.number)
            yield step
        finally:
            group.waiting.limit = math.inf
        pace.took(step.number, time.monotonic() - begin)
        heartbeat.tell(step.number, pace.until(step.number + 1, checkpoints.save_seconds))
        if step.number == loader.steps[-1]:
            saving.last(checkpoints, taken(step.number))
        else:
            saving.after(checkpoints, step.number, taken(step.number))
        begin = time.monotonic()


def _asked_to_stop(stop: StopRequests, needed_seconds: float) -> bool:
    return stop.pending(needed_seconds, look=False) > 0


def _fetched(steps: Iterator[Step]) -> tuple[Step | None, Exception | None]:
    """The next step, or why this rank cannot have it, or neither if it has to stop."""
    try:
        return next(steps), None
    except GivenUp:
        return None, None
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
        return None, error
