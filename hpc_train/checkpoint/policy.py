"""How checkpoints are saved, and which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpc_train.checkpoint.engines import CheckpointEngine
from hpc_train.checkpoint.retention import Retention

Replicas = Literal["stop", "warn", "off"]
Nonfinite = Literal["stop", "warn"]


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
