"""metrics.jsonl and events.jsonl: one JSON object per line, written by rank 0."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train import files
from hpc_train.mpi.phases import STEP_PHASES, WAIT

LARGEST_BACKLOG = 1 << 24  # bytes that are kept to be written later; then new records are dropped
PART_BYTES = 1 << 20  # of a file, which are read at once
SECONDS_OF = {phase: f"{'comm' if phase == WAIT else phase}_seconds" for phase in STEP_PHASES}
"""The keys of the phases' seconds in a record."""
LOOP_KEYS = frozenset(SECONDS_OF.values()) | {
    *("step", "epoch", "lr", "time", "memory_gb", "samples_per_second", "step_seconds"),
    *("slow_rank", "slow_seconds", "restarts", "lost_steps"),
    *("node_hours", "joules", "metered_node_hours", "samples_per_joule"),
}
"""The keys that records of a Loop have by themselves, but for the shares of a mixture."""
TRAINER_KEYS = LOOP_KEYS | {
    *("loss", "validation_loss", "grad_norm", "tokens_per_second", "tokens_per_joule"),
    *("tflops", "mfu", "skipped_steps", "substituted_samples"),
}
"""The keys of the Trainer's records, but for the scores of validations and those shares."""

logger = logging.getLogger(__name__)


class RecordsFile:
    """Appends records to a file, each complete when `write` returns.

    A file that cannot be written does not end the run. There is one warning, and the record is
    written together with a later one.

    Args:
        path: the file. Its folder must exist.
        after_step: the step of the checkpoint that the run resumes from. Records of later steps are
            dropped, because those steps are computed again. None keeps all.

    Attributes:
        dropped: the last record that was dropped; empty if none was.

    Raises:
        OSError: the file cannot be written at the start.
    """

    def __init__(self, path: Path, after_step: int | None = None) -> None:
        self.path = path
        self.dropped: dict[str, Any] = {}
        if after_step is not None and path.exists():
            self._drop_later(after_step)
        self._descriptor: int | None = self._open()
        self._rest = bytearray(b"" if _is_whole(path) else b"\n")
        self._warned = False

    def _drop_later(self, after_step: int) -> None:
        """Drop the end of the file: what follows the last record that the run keeps."""
        kept = size = self.path.stat().st_size
        for line in _lines_from_the_end(self.path):
            record = _record_of(line)
            if record and int(record["step"]) <= after_step:
                break
            self.dropped = self.dropped or record
            kept -= len(line)
        if kept < size:
            files.write_whole(self.path, _first_bytes(self.path, kept))

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return files.call("create", os.open, self.path, flags, 0o666)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. Numbers that JSON does not have (NaN, infinity) become null."""
        finite = {key: None if _is_odd(value) else value for key, value in record.items()}
        line = (json.dumps(finite) + "\n").encode()
        if len(self._rest) < LARGEST_BACKLOG:
            self._rest += line
        try:
            self._append()
        except OSError as error:
            self._close()  # a stale file handle stays stale, so the next write opens the file again
            if not self._warned:
                logger.warning("%s cannot be written (%s); training goes on", self.path, error)
            self._warned = True
        else:
            if self._warned:
                logger.warning("%s can be written again", self.path)
            self._warned = False

    def _append(self) -> None:
        """Write all records that are left. After an error, go on behind the bytes written."""
        if self._descriptor is None:
            self._descriptor = self._open()
        while self._rest:
            count = files.call("append", os.write, self._descriptor, bytes(self._rest))
            del self._rest[:count]

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def close(self) -> None:
        """Write the records that are left, if that is possible, and close the file."""
        with suppress(OSError):
            self._append()
        self._close()


def _is_whole(path: Path) -> bool:
    """Whether a file has no line that a killed job did not finish."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1) in (b"", b"\n")


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _first_bytes(path: Path, count: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(min(count, PART_BYTES)):
            yield part
            count -= len(part)


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    """The lines of a file with their ends, the last one first."""
    with path.open("rb") as file:
        begin, rest = file.seek(0, os.SEEK_END), b""
        while begin:
            count = min(begin, PART_BYTES)
            begin -= count
            file.seek(begin)
            first, *lines = (file.read(count) + rest).splitlines(keepends=True)
            yield from reversed(lines)
            rest = first
        if rest:
            yield rest


def _record_of(line: bytes) -> dict[str, Any]:
    """The record in a line; empty if a killed run did not finish it."""
    with suppress(ValueError, KeyError, TypeError, OverflowError):
        record = files.parsed_object(line) or {}
        int(record["step"])
        return record
    return {}
