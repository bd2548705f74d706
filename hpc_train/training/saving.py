"""When a running job writes a checkpoint, and what happens if it cannot."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.policy import Nonfinite, Retention, SavePolicy
from hpc_train.checkpoint.weights import start_from
from hpc_train.config import CheckpointSection, DataSection
from hpc_train.errors import CheckpointError, ConfigError, HpcTrainError
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)


def policy_of(section: CheckpointSection, nonfinite: Nonfinite) -> SavePolicy:
    """How checkpoints are saved, by the configuration."""
    return SavePolicy(
        Retention(section.keep, section.keep_every, section.keep_best),
        engine=section.engine,
        background=section.background,
        verify=section.verify,
        replicas=section.replicas,
        nonfinite=nonfinite,
    )


def check_best(
    section: CheckpointSection, data: DataSection, last_step: int, *, held_out: bool
) -> None:
    """Check that some checkpoint but the last can be one of the best: that its step is validated.

    Raises:
        ConfigError: `keep_best` would keep none.
    """
    validated, by_time = data.validation_every, section.minutes or section.mtbf_hours
    if not section.keep_best or (validated and by_time):
        return
    if validated and section.every and math.lcm(section.every, validated) <= last_step:
        return
    why = f"data.validation_every is {validated}" if held_out else "nothing is held out"
    raise ConfigError(
        f"checkpoint.keep_best is {section.keep_best}, but no checkpoint before the last will have "
        f"a validation loss: checkpoint.every is {section.every}, and {why}",
        "set data.validation_every to checkpoint.every or to a number that divides it"
        if held_out
        else "hold out data for validation, or leave checkpoint.keep_best out",
    )


def resume_or_start(checkpoints: Checkpoints, section: CheckpointSection) -> int:
    """Restore the newest state, or else the weights to start from, if any are given. Collective.

    Returns:
        The step after which training goes on.

    Raises:
        HpcTrainError: as `Checkpoints.resume` and `start_from`.
    """
    after = checkpoints.resume(section.resume)
    if section.weights and not after:
        start_from(
            Path(section.weights),
            checkpoints.state.model,
            checkpoints.state.shards,
            checkpoints.group,
            include=section.include,
            exclude=section.exclude,
        )
    return after


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """The time between two checkpoints for which least is lost to them and to failures together.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22, 2006, equation 37; its first term is Young's (CACM 17, 1974).

    Args:
        save_seconds: what one checkpoint takes.
        mtbf_seconds: the mean time between two failures of the job.

    Returns:
        Seconds from the end of one checkpoint to the start of the next.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = math.sqrt(save_seconds / (2 * mtbf_seconds))
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    return young * (1 + part / 3 + part**2 / 9) - save_seconds


@contextmanager
def finishing_saves(checkpoints: Checkpoints) -> Iterator[None]:
    """Finish what is being written in the background before an error of all ranks ends the job."""
    try:
        yield
    except HpcTrainError as error:
        if error.agreed:  # else the ranks are not all here
            with suppress(HpcTrainError):
                checkpoints.finish()
        raise


@dataclass
class Saving:
    """Writes checkpoints while a job trains.

    Args:
        steps: number of steps between two checkpoints; 0 disables saving by steps.
        minutes: minutes between two checkpoints; 0 disables saving by time.
        mtbf_hours: mean time between failures of the job. The time between two checkpoints follows
            from it once one has been measured; 0 disables it.
        on_error: "stop": one that cannot be written ends the job; "warn": only the last one does.
        background: whether training goes on while one is written.
    """

    steps: int = 0
    minutes: float = 0.0
    mtbf_hours: float = 0.0
    on_error: Literal["stop", "warn"] = "stop"
    background: bool = False
    untried: bool = True
    """Whether this process has not tried to write one."""
    limited: bool = False
    """Whether the job's time is limited. Then the first one is waited for, which tells how long one
    takes before there is too little time for it."""
    _since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, section: CheckpointSection) -> Saving:
        """As a configuration has it."""
        return cls(
            section.every,
            section.minutes,
            section.mtbf_hours,
            section.on_error,
            section.background,
        )

    def after(self, checkpoints: Checkpoints, step: int, taken: int | None = None) -> None:
        """Write one after this step, if one is due; go on with the one before. Collective.

        Args:
            checkpoints: write it.
            step: that has just ended.
            taken: the last step that was taken, if it is another one; 0: none was.

        Raises:
            CheckpointError: it could not be written; older ones are untouched.
            DivergenceError: replicas differ.
        """
        with self._tolerated():
            checkpoints.poll()
        seconds = checkpoints.save_seconds
        if checkpoints.saving and not seconds:
            seconds = math.inf  # what one takes is not known yet
        if not self.due(step, seconds, checkpoints.group):
            return
        with self._tolerated():
            checkpoints.finish()
        self.now(checkpoints, step if taken is None else taken)

    def now(self, checkpoints: Checkpoints, taken: int) -> None:
        """Write one of the last step that was taken, if any was. Collective.

        Raises:
            HpcTrainError: as `after`.
        """
        if taken and taken != checkpoints.saved_step:
            background = self.background and not (self.untried and self.limited)
            self.untried = False
            with self._tolerated():
                checkpoints.save(taken, background=background)
        self._since = time.monotonic()

    def reserve(self, checkpoints: Checkpoints) -> float:
        """Seconds to keep free for the last one.

        Twice what the longest one took, because disks are shared. As long as this process has
        written none, half as much again as an earlier one needed.
        """
        return 2 * checkpoints.longest_save or 1.5 * checkpoints.earlier_save

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:  # the same one on all ranks
            if self.on_error == "stop":
                raise
            logger.warning("%s; training goes on", error)

    def last(self, checkpoints: Checkpoints, step: int) -> None:
        """Write the last one of this process, and wait for it. Collective.

        Args:
            checkpoints: write it.
            step: the last one that was taken; 0: none was, and nothing is written.

        Raises:
            CheckpointError: it could not be written; older ones are untouched.
            DivergenceError: replicas differ.
        """
        try:
            checkpoints.finish()
        except CheckpointError as error:
            logger.warning("%s; the next one is written now", error)
        if step:
            checkpoints.save(step)

    def due(self, step: int, save_seconds: float, group: Group) -> bool:
        """Whether to write one after this step. Collective if it goes by time.

        Args:
            step: that has just ended.
            save_seconds: what the last one took; 0 before the first, infinite during it.
            group: the ranks of the job, whose clocks differ: rank 0's counts.
        """
        if self.steps and step % self.steps == 0:
            return True
        limit = self._limit(save_seconds)
        if math.isinf(limit):
            return False
        passed = time.monotonic() - self._since > limit
        return group.from_first(lambda: passed)

    def _limit(self, save_seconds: float) -> float:
        """Seconds between two; infinite if they do not go by time."""
        limits = [60 * self.minutes] if self.minutes else []
        if self.mtbf_hours and math.isfinite(save_seconds):
            limits.append(daly(save_seconds, 3600 * self.mtbf_hours))
        return min(limits, default=math.inf)
