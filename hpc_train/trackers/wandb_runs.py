"""Exports a run to W&B: offline, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import shutil
import uuid
from typing import Any

import wandb

from hpc_train.trackers.feed import MarkFile
from hpc_train.trackers.source import TrackedRun, numbers_of


class WandbRuns(MarkFile):
    """Writes a run of W&B to the folder `wandb`. Each export continues it.

    W&B takes back no steps. Where later ones must go, a run with another id takes the place of the
    one that has them.

    Args:
        run: the run.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.folder / "wandb" / "hpc_train.json")
        self.run = run
        self.id = ""
        self._before: dict[str, Any] = {}
        self._unmarked = False
        self._wandb: Any = None

    def read_mark(self) -> dict[str, Any]:
        """The mark that was written last; an empty one if there is none."""
        self._before = super().read_mark()
        return self._before

    def begin(self, after: int) -> int:
        """Continue the run, or replace it if it has later steps. Returns the step it has."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self.id = self._before.get("id", "")
        # After an export that was killed nobody knows what the run has.
        if self.id and after == self._before["step"] and not self._before["open"]:
            return after
        for old in folder.glob(f"offline-run-*-{self.id}") if self.id else ():
            shutil.rmtree(old)
        self.id = uuid.uuid4().hex[:8]
        return 0

    def log(self, record: dict[str, Any]) -> None:
        """Take a record."""
        if self._wandb is None:
            self._wandb = self._init()
            super().write_mark(self._before | {"id": self.id, "open": True})
        self._unmarked = True
        self._wandb.log(numbers_of(record) | {"_timestamp": record["time"]}, step=record["step"])

    def _init(self) -> Any:
        return wandb.init(
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(self.run.folder),
            project=os.environ.get("WANDB_PROJECT", "hpc_train"),
            id=self.id,
            name=self.run.name,
            resume="allow",
            config=self.run.values(),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, x_disable_stats=True
            ),
        )

    def write_mark(self, mark: dict[str, Any]) -> None:
        """Write the mark, with the id of the run. Nothing is sure until `close`."""
        self._before = mark | {"id": self.id}
        self._unmarked = False
        super().write_mark(self._before | {"open": self._wandb is not None})

    def close(self) -> None:
        """End the run of W&B."""
        if self._wandb is not None:
            self._wandb.finish()
            super().write_mark(self._before | {"open": self._unmarked})
