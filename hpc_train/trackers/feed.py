"""Feeds a tracker from metrics.jsonl: each record once, also over restarts, kills and resumes."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Protocol

from hpc_train import files
from hpc_train.errors import DataError, UserError
from hpc_train.trackers.source import TrackedRun

READ_BYTES = 1 << 20  # bytes of metrics.jsonl that are read at once


class Sink(Protocol):
    """Where records go. What is logged counts for good once `write_mark` has returned.

    A mark is what a sink keeps beside the records to know which ones it has: the last step as
    "step", and as "start" the time of the newest event "start" that it has heeded.
    """

    def read_mark(self) -> dict[str, Any]:
        """The mark that was written last; an empty one if nothing is there."""

    def begin(self, after: int) -> int:
        """Drop what is there of steps later than `after`.

        Returns:
            The step after which records are needed: `after`, or less if more had to go.
        """

    def log(self, record: dict[str, Any]) -> None:
        """Take a record."""

    def write_mark(self, mark: dict[str, Any]) -> None:
        """Make durable what was logged, and then the mark."""

    def end_pass(self) -> None:
        """Note that all records that there were by now have been logged and marked."""

    def close(self) -> None:
        """End."""


class MarkFile:
    """Keeps a mark in a file. The file lies in the folder of the records, and goes with it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_mark(self) -> dict[str, Any]:
        """The mark that was written last; an empty one if nothing is there."""
        try:
            return files.parsed_object(self.path.read_bytes()) or {}
        except FileNotFoundError:
            return {}

    def write_mark(self, mark: dict[str, Any]) -> None:
        """Write the mark."""
        files.write_text(self.path, json.dumps(mark) + "\n")

    def end_pass(self) -> None:
        """Do nothing."""


def claim_folder(run: TrackedRun) -> None:
    """Keep the folder of an export for one run, also over later calls.

    Raises:
        UserError: it has the export of another run.
        OSError: it cannot be read or written.
    """
    own = os.fsencode(run.path.resolve())
    if own == os.fsencode(run.folder.resolve()):
        return  # what lies in the run directory is of this run
    path = run.folder / ".trackers" / "run"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        files.write_whole(path, [own])
    if (known := path.read_bytes()) != own:
        raise UserError(
            f"{run.folder} has the export of another run, {os.fsdecode(known)}",
            f"give another --out, or remove {path} if it is the same run, which was moved",
        )


class Feed:
    """Passes the records of a run to a sink.

    Args:
        run: the run.
        name: the name of the tracker.
        sink: where the records go. `close` closes it.

    Attributes:
        step: the last step that was logged.
        marked: the last step that counts for good.

    Raises:
        UserError: another process passes records to the same place.
        OSError: a file cannot be read or written.
    """

    def __init__(self, run: TrackedRun, name: str, sink: Sink) -> None:
        self.sink = sink
        self._lock = _locked(run.folder / ".trackers" / f"{name}.lock", name)
        self._file = None
        try:
            # Events first: a start that is read without its records is heeded too early, and
            # records that are read without their start would be taken for those of before.
            starts = run.starts()
            mark = sink.read_mark()
            self.step = sink.begin(_kept(mark, starts))
            self._mark = {"start": starts[-1]["time"] if starts else None}
            self._path = run.path / "metrics.jsonl"
            self._file = self._path.open("rb")
            self._write_mark()
        except BaseException:
            self.close()
            raise
        self._rest, self._line = b"", 0  # the number of the last complete line

    def pass_on(self) -> int:
        """Pass on the records that were written since the last call. Returns their number.

        A line that is not complete yet is left for the next call.

        Raises:
            DataError: a record has no integer as its step, or no number as its time.
        """
        assert self._file is not None
        count = 0
        while chunk := self._file.read(READ_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._line += 1
                record = files.parsed_object(line)
                if record is not None and self._step_of(record) > self.step:
                    if not isinstance(record.get("time"), int | float):
                        raise self._wrong(record, "time", "a number of seconds since 1970")
                    self.sink.log(record)
                    self.step = record["step"]
                    count += 1
            self._write_mark()
        self.sink.end_pass()
        return count

    def _write_mark(self) -> None:
        self.sink.write_mark(self._mark | {"step": self.step})
        self.marked = self.step

    def _step_of(self, record: dict[str, Any]) -> int:
        step = record.get("step", 0)
        if not isinstance(step, int):
            raise self._wrong(record, "step", "an integer")
        return step

    def _wrong(self, record: dict[str, Any], key: str, kind: str) -> DataError:
        return DataError(
            f"{self._path}, line {self._line}: the {key} of the record is {record.get(key)!r}",
            f"give the {key} as {kind} there, or remove the line",
        )

    def close(self) -> None:
        """Close the sink and the files."""
        try:
            self.sink.close()
        finally:
            self._lock.close()
            if self._file is not None:
                self._file.close()


def _kept(mark: dict[str, Any], starts: list[dict[str, Any]]) -> int:
    """The last step whose records hold for good, of those that a sink has."""
    if not mark:
        return 0
    times = [start["time"] for start in starts]
    if mark.get("start") not in times:
        return 0 if times else int(mark["step"])  # the run has been begun anew
    later = starts[times.index(mark["start"]) + 1 :]
    return min([int(mark["step"]), *(int(start["after"]) for start in later)])


def _locked(path: Path, name: str) -> Any:
    """A file that no other process has locked; on file systems without locks, any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"another process writes to {name} in {path.parent.parent} now",
            "wait until it has ended, or export to another folder with --out",
        ) from None
    except OSError:
        pass
    return file
