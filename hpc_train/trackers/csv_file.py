"""Writes metrics.csv: one row for each record, one column for each key."""

from __future__ import annotations

import csv
import io
from typing import Any

from hpc_train import files
from hpc_train.trackers.source import TrackedRun


class CsvFile:
    """Writes metrics.csv, from the first record on at each start.

    Args:
        run: the run.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.path = run.folder / "metrics.csv"
        self.columns: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._fresh = True

    def read_mark(self) -> dict[str, Any]:
        """An empty mark: all records are written again."""
        return {}

    def begin(self, after: int) -> int:
        """Begin with no rows. Returns 0."""
        return 0

    def log(self, record: dict[str, Any]) -> None:
        """Take a record."""
        self._rows.append(record)

    def write_mark(self, mark: dict[str, Any]) -> None:
        """Write the rows that are left. If they have new columns, write the whole file again."""
        new = dict.fromkeys(key for row in self._rows for key in row if key not in self.columns)
        if self._fresh or new:
            self._widen([*self.columns, *new])
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerows(self._rows)
        self._rows.clear()

    def _widen(self, columns: list[str]) -> None:
        before = [] if self._fresh else list(csv.DictReader(io.StringIO(self.path.read_text())))
        made = io.StringIO(newline="")
        writer = csv.DictWriter(made, columns, lineterminator="\n")
        if columns:
            writer.writeheader()
        writer.writerows(before)
        files.write_text(self.path, made.getvalue())
        self.columns, self._fresh = columns, False

    def close(self) -> None:
        """Do nothing, as nothing is open."""
