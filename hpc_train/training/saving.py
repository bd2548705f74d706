"""Decides when a running job writes a checkpoint, and what happens if it cannot."""

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
from hpc_train.config import CheckpointSection, DataSection, RunConfig
from hpc_train.errors import CheckpointError, ConfigError, HpcTrainError
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)


def policy_of(section: CheckpointSection, nonfinite: Nonfinite) -> SavePolicy:
    """The policy of saving that a configuration asks for."""
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
    """Check that `keep_best` can rank checkpoints: one before the last has a validation loss.

    Raises:
        ConfigError: `keep_best` would keep no checkpoint.
    """
    validated, by_time = data.validation_every, section.minutes or section.mtbf_hours
    if not section.keep_best or (validated and by_time):
        return
    if validated and section.every and math.lcm(section.every, validated) <= last_step:
        return
    why = f"data.validation_every is {validated}" if held_out else "nothing is held out"
    if validated and section.every and section.every % validated == 0:
        raise ConfigError(
            f"checkpoint.keep_best is {section.keep_best}, but the first checkpoint that has a "
            f"validation loss is that of step {section.every}, and the last step is {last_step}",
            "train for more steps, or leave checkpoint.keep_best out",
        )
    raise ConfigError(
        f"checkpoint.keep_best is {section.keep_best}, but no checkpoint before the last will have "
        f"a validation loss: checkpoint.every is {section.every}, and {why}",
        "set data.validation_every to checkpoint.every or to a number that divides it"
        if held_out
        else "hold out data for validation, or leave checkpoint.keep_best out",
    )


def resume_or_start(checkpoints: Checkpoints, config: RunConfig) -> int:
    """Restore the newest checkpoint. Without one, load `checkpoint.weights` if given. Collective.

    Returns:
        The step after which training continues; 0 if there is no checkpoint.

    Raises:
        HpcTrainError: as `Checkpoints.resume` and `start_from`.
    """
    section = config.checkpoint
    after = checkpoints.resume(section.resume)
    if section.weights and not after:
        start_from(
            Path(section.weights),
            checkpoints.state.model,
            checkpoints.state.shards,
            checkpoints.group,
            streamed=checkpoints.state.streamed,
            include=section.include,
            exclude=section.exclude,
            finetuned=config.finetune.active,
        )
        checkpoints.state.extra.take({})
    return after


def daly(save_seconds: float, mtbf_seconds: float) -> float:
    """The time between two checkpoints that loses least to checkpoints and failures together.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22, 2006, equation 37; its first term is Young's (CACM 17, 1974).

    Args:
        save_seconds: seconds that one checkpoint takes.
        mtbf_seconds: mean seconds between two failures of the job.

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
    """Finish a checkpoint in the background before an error of all ranks ends the job."""
    try:
        yield
    except HpcTrainError as error:
        # Otherwise some ranks are elsewhere, and would not finish it with this one.
        if error.agreed_by(checkpoints.group.size):
            with suppress(HpcTrainError):
                checkpoints.finish()
        raise


@dataclass
class Saving:
    """Writes checkpoints while a job trains.

    Args:
        steps: number of steps between two checkpoints; 0 disables saving by steps.
        minutes: minutes between two checkpoints; 0 disables saving by time.
        mtbf_hours: mean hours between failures of the job. Once a checkpoint has been measured, the
            time between two checkpoints follows from it (`daly`); 0 disables this.
        on_error: "stop": a checkpoint that cannot be written ends the job; "warn": only the last
            one does.
        background: whether training continues while a checkpoint is written.
    """

    steps: int = 0
    minutes: float = 0.0
    mtbf_hours: float = 0.0
    on_error: Literal["stop", "warn"] = "stop"
    background: bool = False
    untried: bool = True
    """Whether this process has not tried to write a checkpoint yet."""
    limited: bool = False
    """Whether the job's time is limited. Then training waits for the first checkpoint: so the job
    knows how long a checkpoint takes while there is still time for one."""
    none: bool = False
    """Whether no checkpoint is written at all, not even the last one."""
    _since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, section: CheckpointSection, *, none: bool = False) -> Saving:
        """The object for a section `checkpoint` of the configuration."""
        return cls(
            section.every,
            section.minutes,
            section.mtbf_hours,
            section.on_error,
            section.background,
            untried=not none,
            none=none,
        )

    def after(self, checkpoints: Checkpoints, step: int, taken: int | None = None) -> None:
        """Continue a save in the background, and write a checkpoint if one is due. Collective.

        Args:
            checkpoints: the checkpoints of the run.
            step: the step that has just ended.
            taken: the last step that the optimizer has taken, if it is another one; 0: none.

        Raises:
            CheckpointError: a checkpoint could not be written; older ones are untouched.
            DivergenceError: replicas differ.
        """
        with self._tolerated():
            checkpoints.poll()
        regular = self.steps or self.minutes or self.mtbf_hours
        if self.background and regular and not self.none:
            checkpoints.get_ready()
        seconds = checkpoints.save_seconds
        if checkpoints.saving and not seconds:
            seconds = math.inf  # the first one is being written, so its time is not known yet
        elif not seconds:
            seconds = checkpoints.longest_save  # if none could be written, of those that failed
        if not self.due(step, seconds, checkpoints.group):
            return
        with self._tolerated():
            checkpoints.finish()
        self.now(checkpoints, step if taken is None else taken)

    def now(self, checkpoints: Checkpoints, taken: int) -> None:
        """Write a checkpoint of step `taken`, unless there is one or it is 0. Collective.

        Raises:
            HpcTrainError: as `after`.
        """
        if taken and taken != checkpoints.saved_step and not self.none:
            background = self.background and not (self.untried and self.limited)
            self.untried = False
            with self._tolerated():
                checkpoints.save(taken, background=background)
        self._since = time.monotonic()

    def reserve(self, checkpoints: Checkpoints) -> float:
        """Seconds to keep free for the last checkpoint.

        They are twice this process's longest save, because disks are shared and their speed varies.
        Before its first save they are 1.5 times the longest save of an earlier process. That one
        may have been an exception, so training writes a checkpoint before it stops because of it.
        """
        return 2 * checkpoints.longest_save or 1.5 * checkpoints.earlier_save

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Warn of a checkpoint that cannot be written, unless `on_error` is "stop"."""
        try:
            yield
        except CheckpointError as error:  # the same one on all ranks
            if self.on_error == "stop":
                raise
            logger.warning("%s; training goes on", error)

    def last(self, checkpoints: Checkpoints, step: int) -> None:
        """Write the last checkpoint of this process, and wait until it is written. Collective.

        Args:
            checkpoints: the checkpoints of the run.
            step: the last step that the optimizer has taken; 0: none, so nothing is written.

        Raises:
            CheckpointError: the checkpoint could not be written; older ones are untouched.
            DivergenceError: replicas differ.
        """
        try:
            checkpoints.finish()
        except CheckpointError as error:
            logger.warning("%s; the last checkpoint is written now", error)
        if step and not self.none:
            checkpoints.save(step)

    def due(self, step: int, save_seconds: float, group: Group) -> bool:
        """Whether a checkpoint is due after this step. Collective if time decides.

        Args:
            step: the step that has just ended.
            save_seconds: seconds of the last save, or of one that failed if none has succeeded; 0
                before the first one, infinite during it.
            group: the ranks of the job. Rank 0 decides, because their clocks differ.
        """
        if self.steps and step % self.steps == 0:
            return True
        limit = self._limit(save_seconds)
        if math.isinf(limit):
            return False
        passed = time.monotonic() - self._since > limit
        return group.from_first(lambda: passed)

    def _limit(self, save_seconds: float) -> float:
        """Seconds between two checkpoints; infinite if time does not decide."""
        limits = [60 * self.minutes] if self.minutes else []
        if self.mtbf_hours and math.isfinite(save_seconds):
            limits.append(daly(save_seconds, 3600 * self.mtbf_hours))
        return min(limits, default=math.inf)
