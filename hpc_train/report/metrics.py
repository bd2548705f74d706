"""Reads metrics.jsonl in one pass, also while another job appends to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError
from hpc_train.files import parsed_object
from hpc_train.monitoring.records import TRAINER_KEYS
from hpc_train.report.decimation import BUCKETS, Decimation, Floats

CHUNK = 1 << 22  # bytes that are read at once
TAIL = 1 << 12  # last bytes that were read, by which the file is known again
AMOUNTS = {"samples": "samples_per_second", "tokens": "tokens_per_second"}
"""Amounts of data since the first step, and the keys that they are computed from."""
RATES = (*AMOUNTS.values(), "tflops", "mfu")  # amounts per second, whose means are over time
NO_CURVE = ("slow_rank", "epoch")  # numbers that stand for things, or say nothing
MOST_KEYS = 64  # of scores that have a curve, and of other keys that the Trainer does not record


class StepMeans:
    """Means over steps, of records that are each a mean over the steps since the one before.

    A record counts as often as it has steps, and a rate by their seconds. The first record of each
    start, whose steps warm up, is left out if there are others.
    """

    def __init__(self) -> None:
        # For each key the weighted sum and the weights: of the records that count, and of all.
        self._sums: dict[str, Floats] = {}

    def add(self, columns: Mapping[str, Floats], done: Floats, warm: NDArray[np.bool_]) -> None:
        """Add records.

        Args:
            columns: for each key its value in each record; NaN where there is none.
            done: the number of steps of each record.
            warm: whether a record is not the first one of its start.
        """
        seconds = columns.get("step_seconds", 1.0)
        with np.errstate(over="ignore", invalid="ignore"):
            for key, values in columns.items():
                weights = np.fmax(done * seconds if key in RATES else done, 0.0)
                parts = np.stack([weights * values, weights])
                parts[:, ~np.isfinite(parts).all(0)] = 0.0
                sums = np.stack([parts[:, warm].sum(1), parts.sum(1)])
                self._sums[key] = self._sums.get(key, 0.0) + sums

    def mean(self, key: str) -> float:
        """The mean of a key; NaN if there is none."""
        found = [total / weight for total, weight in self._sums.get(key, ()) if weight > 0]
        return float(found[0]) if found else np.nan


class Metrics:
    """The curves of a run.

    Args:
        path: metrics.jsonl, which need not exist.
        buckets: most buckets of a curve.

    Attributes:
        decimation: what is kept of all numbers; `samples` and `tokens` are amounts since step 0.
        means: the means over the steps.
        keys: the keys that have a curve.
        left_out: some of the keys beyond `MOST_KEYS`, which have none.
        damaged: number of lines that are no records.
        not_finite: for each key the number of records in which it is null, and the first and the
            last such step.
    """

    def __init__(self, path: Path, buckets: int = BUCKETS) -> None:
        self.path, self.buckets = path, buckets
        self._forget()

    def _forget(self) -> None:
        self.decimation = Decimation(self.buckets)
        self.means = StepMeans()
        self.keys: set[str] = set()
        self.left_out: set[str] = set()
        self._free = {True: MOST_KEYS, False: MOST_KEYS}  # places of scores, and of other keys
        self.damaged = 0
        self.not_finite: dict[str, tuple[int, float, float]] = {}
        self._position = 0
        self._tail = b""  # the bytes before `_position`
        self._step = 0.0
        self._amounts = dict.fromkeys(AMOUNTS, (0.0, np.nan))  # so far, and per step

    def update(self, starts: Sequence[float] = ()) -> None:
        """Read the lines that are new since the last call. The last line may be half-written.

        If another file has taken the place of the one that was read, all is read again.

        Args:
            starts: the steps after which the run was resumed, in their order.

        Raises:
            UserError: the file cannot be read.
        """
        self._starts = np.array([0, *starts], np.float64)
        try:
            with self.path.open("rb") as file:
                file.seek(self._position - len(self._tail))
                # A new file may have the inode of the old one, and records tell their times.
                if file.read(len(self._tail)) != self._tail:
                    self._forget()
                file.seek(self._position)
                self._read(file)
        except FileNotFoundError:
            self._forget()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read ({error.strerror or error})",
                "give a run directory that you can read",
            ) from error

    def _read(self, file: Any) -> None:
        rest: list[bytes] = []
        while chunk := file.read(CHUNK):
            whole, newline, left = chunk.rpartition(b"\n")
            if newline:
                text = b"".join([*rest, whole])
                self._position += len(text) + 1
                self._tail = (self._tail + text + b"\n")[-TAIL:]
                self._parse(text)
                rest = []
            rest.append(left)

    def _parse(self, text: bytes) -> None:
        lines = text.split(b"\n")
        try:  # many lines at once take less time
            parsed = json.loads(b"[%s]" % b",".join(lines))
        except (ValueError, RecursionError):
            parsed = [parsed_object(line) for line in lines if line.strip()]
        records = [record for record in parsed if isinstance(record, dict)]
        steps = _column(records, "step")
        sound = np.isfinite(steps)
        if not sound.all():
            records = [record for record, good in zip(records, sound, strict=True) if good]
            steps = steps[sound]
        self.damaged += len(parsed) - len(records)
        if records:
            self._add(records, steps)

    def _add(self, records: list[dict[str, Any]], steps: Floats) -> None:
        found = dict.fromkeys(key for some in {tuple(record) for record in records} for key in some)
        self._choose_keys(found)
        columns = {}
        for key in found:
            if key in self.keys:
                values = columns[key] = _column(records, key)
                self._find_nulls(key, records, steps, values)
        before = np.concatenate([[self._step], steps[:-1]])
        start, start_before = np.searchsorted(self._starts, [steps, before])
        done = steps - np.fmax(before, self._starts[np.fmax(start - 1, 0)])
        self.means.add(columns, done, start == start_before)
        done = steps - before  # of all starts
        for amount, rate in AMOUNTS.items():
            if rate in columns and "step_seconds" in columns:
                columns[amount] = self._amount(
                    amount, done, columns[rate] * columns["step_seconds"]
                )
        self._step = float(steps[-1])
        self.decimation.add(
            steps, {key: values for key, values in columns.items() if np.isfinite(values).any()}
        )

    def _choose_keys(self, found: Iterable[str]) -> None:
        """Choose which of the keys have a curve."""
        for key in found:
            if key in self.keys or key in NO_CURVE:
                continue
            score = key.startswith("validation_")
            if key in TRAINER_KEYS:
                self.keys.add(key)
            elif self._free[score]:
                self._free[score] -= 1
                self.keys.add(key)
            elif len(self.left_out) < MOST_KEYS:
                self.left_out.add(key)

    def _find_nulls(
        self, key: str, records: list[dict[str, Any]], steps: Floats, values: Floats
    ) -> None:
        missing = np.flatnonzero(~np.isfinite(values))
        nulls = [
            place for place in missing if key in records[place] and _is_null(records[place][key])
        ]
        if nulls:
            count, first, _ = self.not_finite.get(key, (0, float(steps[nulls[0]]), 0.0))
            self.not_finite[key] = (count + len(nulls), first, float(steps[nulls[-1]]))

    def _amount(self, amount: str, done: Floats, per_step: Floats) -> Floats:
        """The amount after each record. A record without speed has that of the one before."""
        so_far, last = self._amounts[amount]
        known = np.concatenate([[last], per_step])
        place = np.where(np.isfinite(known), np.arange(len(known)), 0)
        per_step = known[np.maximum.accumulate(place)][1:]
        amounts = so_far + np.cumsum(np.nan_to_num(done * np.round(per_step)))
        self._amounts[amount] = (float(amounts[-1]), float(per_step[-1]))
        return np.asarray(amounts, np.float64)


def _column(records: list[dict[str, Any]], key: str) -> Floats:
    """The numbers of a key; NaN where it is missing or no number."""
    values = [record.get(key) for record in records]
    with suppress(TypeError, ValueError, OverflowError):
        column = np.array(values, np.float64)
        if column.ndim == 1:  # not if all of them are equally long lists
            return column
    return np.array([number(value) for value in values], np.float64)


def number(value: Any) -> float:
    """The value as a float; NaN if it is no number."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return np.nan
    return np.nan


def _is_null(value: Any) -> bool:
    return value is None or isinstance(value, float)
