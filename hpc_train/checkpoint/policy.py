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
    """A checkpoint is kept for any of these reasons; the newest one whose numbers are finite is.

    Args:
        newest: number of newest checkpoints to keep; 0 keeps all.
        every: keeps the checkpoints of steps that this number divides; 0 disables it.
        best: number of checkpoints with the lowest score to keep.
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
        """Those to remove, oldest first.

        Args:
            steps: of all checkpoints that are complete.
            scores: of those that have one.
            is_finite: whether the numbers of one are; asked from the newest one on, until one is.
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
        verify: whether what was written by POSIX calls is read back, as it is through MPI-IO.
        replicas: what happens if ranks that should hold the same bits do not. Each checkpoint
            compares a sample of them: "stop", "warn", or "off" for no comparison.
        nonfinite: what happens if trained parameters are infinite or not numbers: "stop" before
            anything is written, or "warn", and the checkpoint says so.
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
