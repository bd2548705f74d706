"""The boundary between two steps: fetch, agree, stop, save. Every training loop runs over it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from hpc_train.checkpoint import Checkpoints
from hpc_train.data.loader import Loader, Step
from hpc_train.errors import ConfigError, Stopped
from hpc_train.monitoring.meter import Meter
from hpc_train.mpi.agreement import agreed
from hpc_train.training.heartbeat import Heartbeat
from hpc_train.training.preemption import StopRequests
from hpc_train.training.saving import Saving

HANG = 30.0  # seconds: shorter waits are a machine's own hiccups


def guarded_steps(
    loader: Loader,
    checkpoints: Checkpoints,
    stop: StopRequests,
    saving: Saving,
    meter: Meter | None = None,
    hang_steps: int = 0,
) -> Iterator[Step]:
    """Deliver the loader's steps, each of which the caller computes before the next. Collective.

    A batch that one rank cannot read is an error on all. A stop request of any rank makes all save
    the last finished step and raise. Checkpoints are written when they are due and at the end.

    Args:
        loader: of the steps that are left.
        checkpoints: hold the state; their group is all ranks of the job.
        stop: collects the reasons to stop.
        saving: knows when to save.
        meter: is told how long batches are waited for.
        hang_steps: a rank that waits for another, within a step, for as long as so many steps have
            taken hangs, if that is at least HANG seconds; 0: only the watchdog's time counts.

    Raises:
        Stopped: a signal or the time limit.
        ConfigError: the time limit leaves no time for a single step.
        HpcTrainError: reading or saving failed.
    """
    group = checkpoints.group
    steps = iter(loader)
    longest = 0.0
    done = loader.steps.start - 1
    heartbeat = Heartbeat(group, done)
    begin = time.monotonic()
    for done in range(loader.steps.start - 1, loader.steps.stop - 1):
        asked = time.monotonic()
        with agreed(group):
            step = next(steps)
            if meter is not None:
                meter.data_seconds += time.monotonic() - asked
        reason = stop.agree(group, needed_seconds=longest + 2 * checkpoints.save_seconds)
        if reason:
            if done == loader.steps.start - 1 and reason.startswith("run.time_limit"):
                raise ConfigError(f"{reason} is over before the first step", "give more time")
            if done:
                saving.last(checkpoints, done)
            raise Stopped(done, reason)
        measured = hang_steps and step.number > loader.steps.start + 1  # the first steps tell less
        limit = max(HANG, hang_steps * longest) if measured else math.inf
        try:
            group.waiting.limit = limit
            yield step
        finally:
            group.waiting.limit = math.inf
        saves = 4 * checkpoints.save_seconds
        heartbeat.tell(step.number, 2 * limit + saves if measured and saves else 0.0)
        longest = max(longest, time.monotonic() - begin)
        if step.number == loader.steps[-1]:
            saving.last(checkpoints, step.number)
        else:
            saving.after(checkpoints, step.number)
        begin = time.monotonic()
