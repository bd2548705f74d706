"""Writes metrics.csv: one row for each record, one column for each key."""

from __future__ import annotations

import csv
import io
from typing import Any

from hpc_train import files
from hpc_train.trackers.source import TrackedRun


class CsvFile:
    """Writes metrics.csv, from the first record on at each start.

    The file of before stays until all records that there are have been written anew, so one that
    cannot be passed on costs none of its rows.

    Args:
        run: the run.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.path = run.folder / "metrics.csv"
        self._written = run.folder / ".metrics.csv.partial"  # `path` once that is replaced
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
        with self._written.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerows(self._rows)
        self._rows.clear()

    def end_pass(self) -> None:
        """Replace the file of before."""
        if self._written != self.path:
            files.rename(self._written, self.path)
            self._written = self.path

    def _widen(self, columns: list[str]) -> None:
        before: list[dict[str, Any]] = []
        if not self._fresh:
            before += csv.DictReader(io.StringIO(self._written.read_text(encoding="utf-8")))
        made = io.StringIO(newline="")
        writer = csv.DictWriter(made, columns, lineterminator="\n")
        if columns:
            writer.writeheader()
        writer.writerows(before)
        files.write_text(self._written, made.getvalue())
        self.columns, self._fresh = columns, False

    def close(self) -> None:
        """Remove what was not written to its end."""
        if self._written != self.path:
            files.remove(self._written)
