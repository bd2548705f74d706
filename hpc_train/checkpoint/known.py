"""What a run knows of its checkpoints: their scores, and whether their numbers are finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpc_train.checkpoint import restore
from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.checkpoint.policy import Retention
from hpc_train.errors import CheckpointError, CheckpointMismatch, CheckpointUnreadable


class Known:
    """Scores by step, and finite or not. Files tell what this process has not seen itself.

    Attributes:
        scores: the model's score by step, where known; lower is better.
        finite: whether the numbers of a step's checkpoint are finite, where known.
    """

    def __init__(self) -> None:
        self.scores: dict[int, float | None] = {}
        self.finite: dict[int, bool] = {}

    def values(self, step: int) -> dict[str, Any]:
        """What the checkpoint of a step tells of itself, as plain JSON values."""
        values: dict[str, Any] = {}
        score = self.scores.get(step)
        if score is not None and math.isfinite(score):  # JSON has no other numbers
            values["score"] = score
        if not self.finite.get(step, True):
            values["finite"] = False
        return values

    def superfluous(self, directory: Path, step: int, rule: Retention) -> list[Path]:
        """The checkpoints of a run that a rule does not keep, oldest first.

        Those of steps after this one stay and do not count: the run has passed over them as
        damaged.

        Raises:
            CheckpointUnreadable: a checkpoint cannot be read.
        """
        there = {step_of(path): path for path in find_checkpoints(directory, "auto")}
        done = {number: path for number, path in there.items() if number <= step}
        if rule.best:
            for number in done.keys() - self.scores.keys():
                self.scores[number] = _state_of(done[number]).get("score")
        scores = dict(self.scores)  # a copy, because the main thread may add to it
        known = {n: score for n, score in scores.items() if score is not None}
        known = {n: score for n, score in known.items() if math.isfinite(score)}

        def is_finite(number: int) -> bool:
            if number not in self.finite:
                self.finite[number] = _state_of(done[number]).get("finite", True)
            return self.finite[number]

        return [done[number] for number in rule.superfluous(done, known, is_finite)]


def _state_of(path: Path) -> dict[str, Any]:
    """The values that are not tensors in a checkpoint of this run."""
    try:
        return restore.Tensors(path).state()
    except CheckpointUnreadable:
        raise
    except (CheckpointError, CheckpointMismatch):
        return {"finite": False}  # a damaged one is not the one to keep for its finite numbers
