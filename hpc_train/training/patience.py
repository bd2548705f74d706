"""Ends training when the validation loss has not fallen for a while (early stopping)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from hpc_train.checkpoint.state import ExtraState

logger = logging.getLogger(__name__)

_KEY = "patience"


class Patience(ExtraState):
    """Counts the validations since the lowest validation loss. All ranks call each method alike.

    A checkpoint holds the count, so a resumed run ends where an uninterrupted one would.

    Args:
        limit: the number of validations without a lower loss after which training ends; 0: it does
            not end before its last step.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.best = math.inf
        """The lowest validation loss so far."""
        self.best_step = 0
        """The step that had it, the last one of several; 0 before the first validation."""
        self.waited = 0
        """The number of validations since a loss that was lower than all before."""

    def note(self, step: int, loss: float) -> bool:
        """Count a validation.

        Args:
            step: the step that it follows.
            loss: the validation loss. One that is not a number is not lower than another.

        Returns:
            Whether no validation loss so far is lower.
        """
        self.waited = 0 if loss < self.best else self.waited + 1
        best = loss <= self.best
        if best:
            self.best, self.best_step = loss, step
        if self.over:
            logger.info(
                "training ends after step %d: the validation loss was lowest after step %d "
                "(%.6g), and %d validations have not lowered it",
                step,
                self.best_step,
                self.best,
                self.waited,
            )
        return best

    @property
    def over(self) -> bool:
        """Whether training ends now."""
        return 0 < self.limit <= self.waited

    def values(self) -> dict[str, Any]:
        """The lowest loss, its step and the count."""
        if not self.limit:
            return {}
        best = self.best if math.isfinite(self.best) else None  # JSON has no other numbers
        return {_KEY: {"best": best, "best_step": self.best_step, "waited": self.waited}}

    def take(self, values: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. One that has no count lets it begin anew."""
        saved = values.get(_KEY, {})
        best = saved.get("best")
        self.best = math.inf if best is None else best
        self.best_step, self.waited = saved.get("best_step", 0), saved.get("waited", 0)
