"""Passes the records of a run to TensorBoard, MLflow, W&B, CSV, or a class of the user.

`metrics.jsonl` is the source of all of them, in a job and on a login node, so a tracker that is
slow or fails loses nothing. It loads neither torch nor MPI.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """What a class named in `run.trackers` as package.module:Class provides.

    It is made, called and closed in one thread of rank 0, and may take its time. It must start no
    process, as MPI is running. If a method raises an exception, the object is closed, and a new one
    is made a minute later.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], after: int) -> None:
        """Begin to log.

        Args:
            directory: the folder to write to: the run directory, or DIR/NAME of an export with
                `--out DIR`.
            config: the configuration, by section and key.
            after: the last step whose records have been logged for good. What an earlier object may
                have logged of later steps does not count any more: their records come again.
        """

    def log(self, record: Mapping[str, Any]) -> None:
        """Log a record of metrics.jsonl. Its steps increase from one call to the next."""

    def close(self) -> None:
        """End, because the job ends or a method has raised an exception."""
