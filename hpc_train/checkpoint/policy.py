"""How checkpoints are saved, and which of them are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hpc_train.checkpoint.engines import CheckpointEngine

Replicas = Literal["stop", "warn", "off"]
Nonfinite = Literal["stop", "warn"]


@dataclass(frozen=True)
class Retention:
    """The rule by which checkpoints are kept: each of these numbers is a reason to keep some.

    The newest checkpoint whose numbers are finite is always kept.

    Args:
        newest: the number of newest checkpoints to keep; 0 keeps all.
        every: keeps the checkpoints whose step this number divides; 0 disables it.
        best: the number of checkpoints with the lowest scores to keep.
    """

    newest: int = 3
    every: int = 0
    best: int = 0

    def superfluous(
        self,
        steps: Iterable[int],
        scores: Mapping[int, float],
        is_finite: Callable[[int], bool] = lambda step: True,
    ) -> list[int]:
        """The steps whose checkpoints are to be removed, oldest first.

        Args:
            steps: the steps of all complete checkpoints.
            scores: the scores of those that have one, by step; a lower score is better.
            is_finite: whether the checkpoint of a step has finite numbers. It is called for the
                newest step first, then for older ones, until it returns True.
        """
        if not self.newest:
            return []
        ordered = sorted(steps)
        kept = {*ordered[-self.newest :]}
        if self.every:
            kept |= {step for step in ordered if step % self.every == 0}
        scored = [step for step in ordered if step in scores]
        kept |= {*sorted(scored, key=lambda step: (scores[step], -step))[: self.best]}
        if not kept.issuperset(ordered):
            kept |= {next((step for step in reversed(ordered) if is_finite(step)), ordered[-1])}
        return [step for step in ordered if step not in kept]


@dataclass(frozen=True)
class SavePolicy:
    """How a run saves its checkpoints.

    Args:
        keep: the number of newest checkpoints to keep, where 0 keeps all; or a rule.
        engine: how ranks write.
        background: whether `save` will be asked to write in the background.
        verify: whether the ranks read back a file that POSIX calls have written. A file written
            through MPI-IO is always read back.
        replicas: what happens if ranks that should hold the same bits do not. Each checkpoint
            compares a sample of them: "stop", "warn", or "off" for no comparison.
        nonfinite: what happens if trained parameters are infinite or not numbers: "stop" before
            anything is written, or "warn" and record it in the checkpoint.
    """

    keep: int | Retention = 3
    engine: CheckpointEngine = "auto"
    background: bool = False
    verify: bool = True
    replicas: Replicas = "stop"
    nonfinite: Nonfinite = "stop"

    @property
    def retention(self) -> Retention:
        """The rule by which checkpoints are kept."""
        return Retention(self.keep) if isinstance(self.keep, int) else self.keep


DEFAULT_POLICY = SavePolicy()
