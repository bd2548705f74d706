"""The work between two steps of any training loop: fetch, agree, stop, save."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hpc_train.checkpoint import Checkpoints
from hpc_train.data.loader import GivenUp, Loader, Step
from hpc_train.errors import OF_DATA, ConfigError, HpcTrainError, Stopped
from hpc_train.job.heartbeat import Heartbeat, Pace, restarts
from hpc_train.job.preemption import StopRequests
from hpc_train.job.profiling import Profiler
from hpc_train.training.saving import Saving

logger = logging.getLogger(__name__)


def guarded_steps(
    loader: Loader,
    checkpoints: Checkpoints,
    stop: StopRequests,
    saving: Saving,
    pace: Pace,
    profiler: Profiler,
    taken: Callable[[int], int] = lambda step: step,
    together: Callable[[], None] = lambda: None,
) -> Iterator[Step]:
    """Yield the loader's steps. The caller computes each before it asks for the next. Collective.

    If a rank cannot read a batch, all ranks save the last finished step and raise the error. If a
    rank has a reason to stop, all save that step and raise `Stopped`; after `loop.stop()` they
    return instead.
    Checkpoints are written when they are due and at the end.

    Args:
        loader: the loader of the steps that are left.
        checkpoints: the checkpoints of the run; their group is all ranks of the job.
        stop: collects the reasons to stop.
        saving: decides when to save.
        pace: decides how long a rank may wait for another within a step.
        profiler: records the steps that are to be profiled.
        taken: a function of the last step that was yielded. It returns the last step that the
            optimizer has taken; 0: none.
        together: is called before each step, once all ranks have agreed to take it.

    Raises:
        Stopped: a signal, the stop file or the time limit stopped training, with a checkpoint.
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
    profiler.between(done)
    _tell_of_short_job(stop, saving, checkpoints)
    phases = group.waiting.phases
    begin, continued = time.monotonic(), stop.continued
    for done in range(loader.steps.start - 1, loader.steps.stop - 1):
        # A job that was restarted shortly before its end has computed steps before. Any other one
        # takes a step, whatever a save took before: that may have been an exception.
        first = done == loader.steps.start - 1 and not restarts() and not checkpoints.longest_save
        needed = pace.longest + (0.0 if first else saving.reserve(checkpoints))
        untried = saving.untried and done > loader.steps.start - 1
        # If it goes on after a first checkpoint, it needs the batch.
        early = untried and _asked_to_stop(stop, needed)
        loader.give_up = partial(_asked_to_stop, stop, pace.longest if early else needed)
        with phases("data"):
            step, failure = _fetched(steps)
        if failure is None and checkpoints.claim is not None:
            failure = checkpoints.claim.lost()
        # One agreement for everything, because in each one all ranks wait for the slowest.
        asks = profiler.is_asked()
        with _saved_at_failure(saving, checkpoints, taken(done)):
            reason = stop.agree(group, needed, failure, untried=untried, asks=asks)
        if stop.asked:
            profiler.take_request(done + 1)
        late = reason is not None and reason.startswith("time_limit")
        if stop.soon or (late and untried):
            began_saving = time.monotonic()
            with phases("save"):
                saving.now(checkpoints, taken(done))
            begin += time.monotonic() - began_saving  # `reserve` has it already
            # A rank without a batch has given it up because of `needed`. It cannot compute the
            # step, so it asks with the same number again, and all stop.
            now_needed = pace.longest + saving.reserve(checkpoints)
            reason = stop.agree(group, needed if step is None else now_needed)
        if reason:
            if first and late:
                raise ConfigError(f"{reason} is over before the first step", "give more time")
            with phases("save"):
                saving.last(checkpoints, taken(done))
            profiler.finish(done)
            if stop.ended:
                return
            raise Stopped(taken(done), reason, saved=not saving.none)
        assert step is not None  # else `agree` has raised the failure or returned a reason
        together()
        try:
            group.waiting.limit = pace.within(step.number)
            yield step
        finally:
            group.waiting.limit = math.inf
        seconds = time.monotonic() - begin
        pace.took(step.number, seconds, suspended=stop.continued > continued)
        heartbeat.tell(step.number, pace.until(step.number + 1, checkpoints.longest_save))
        with phases("save"):
            if step.number == loader.steps[-1]:
                saving.last(checkpoints, taken(step.number))
            else:
                saving.after(checkpoints, step.number, taken(step.number))
        if profiler.ends_after(step.number):
            heartbeat.tell(step.number, 1.5 * pace.timeout)
        profiler.between(step.number)
        begin, continued = time.monotonic(), stop.continued


@contextmanager
def _saved_at_failure(saving: Saving, checkpoints: Checkpoints, step: int) -> Iterator[None]:
    """Save the last finished step if the data of the next one cannot be read. Collective."""
    try:
        yield
    except Exception as error:
        # All ranks are between two steps, so the state is whole.
        alone = checkpoints.group.comm is None and not isinstance(error, HpcTrainError)
        if alone or isinstance(error, OF_DATA):
            try:
                saving.last(checkpoints, step)
            except (HpcTrainError, OSError, RuntimeError) as unsaved:
                logger.warning("step %d is not saved: %s", step, unsaved)
        raise


def _tell_of_short_job(stop: StopRequests, saving: Saving, checkpoints: Checkpoints) -> None:
    """Warn on rank 0 if the job may end before a checkpoint is written."""
    known = restarts() or saving.none or checkpoints.longest_save
    if known or checkpoints.group.rank > 0 or _asked_to_stop(stop, 0.0):
        return
    if _asked_to_stop(stop, saving.reserve(checkpoints)):
        logger.warning(
            "this job may be too short for a checkpoint: one took %.0f s in an earlier job; "
            "if that is usual, give more time",
            checkpoints.earlier_save,
        )


def _asked_to_stop(stop: StopRequests, needed_seconds: float) -> bool:
    """Whether this rank has a reason to stop, without a look for the stop file."""
    return stop.pending(needed_seconds, look=False) > 0


def _fetched(steps: Iterator[Step]) -> tuple[Step | None, Exception | None]:
    """The next step, or the error in reading it, or neither if this rank has to stop."""
    try:
        return next(steps), None
    except GivenUp:
        return None, None
    except Exception as error:  # noqa: BLE001  # the other ranks must hear of any error
        return None, error
