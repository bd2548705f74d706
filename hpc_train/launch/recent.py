"""What the last records of a run say: how fast it is, what it waits for, when it will be done."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from hpc_train.errors import plural
from hpc_train.files import lines_of
from hpc_train.monitoring.spent import in_three_digits
from hpc_train.times import time_text

LAST_BYTES = 1 << 17  # of metrics.jsonl, in which its last records lie
LEAST_POINTS = 3  # least number of records for a curve
BLOCKS = "▁▂▃▄▅▆▇█"
LABEL = 9  # characters of a curve's name
WAITS = (("comm_seconds", "other ranks"), ("data_seconds", "data"))


class RecentRecords:
    """The last part of a run's metrics.jsonl.

    Args:
        run: the run directory.

    Attributes:
        records: the last records.
        newest: those of the newest start; all if it has none yet.
        steps: the last step by the newest start, or by config.yaml; 0 if neither names one.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.records = list(lines_of(run / "metrics.jsonl", LAST_BYTES))
        starts = [one for one in lines_of(run / "events.jsonl") if one.get("event") == "start"]
        after = next(_whole_numbers(reversed(starts), "after"), 0)
        newest = [one for one in self.records if _number(one.get("step")) > after]
        self.newest = newest or self.records
        self.steps = next(_whole_numbers(reversed(starts), "steps"), None) or _configured_steps(run)

    @property
    def written(self) -> float | None:
        """When the last record was written, in seconds since 1970; None if there is none.

        The record says it. That of an earlier version does not: then the file's time counts.
        """
        time = _number(self.last.get("time"))
        if math.isfinite(time):
            return time
        return (self.run / "metrics.jsonl").stat().st_mtime if self.records else None

    @property
    def last(self) -> dict[str, Any]:
        """The last record; empty if there is none."""
        return self.records[-1] if self.records else {}

    def values(self, key: str) -> list[float]:
        """The values of a key in their order; NaN for those that were infinite or NaN."""
        return [_number(record[key]) for record in self.records if key in record]

    def typical(self, key: str) -> float:
        """The median of a key's values in the newest start; NaN if there is none.

        The first value, whose steps warm up, is left out if there are others.
        """
        found = [_number(record.get(key)) for record in self.newest]
        values = [value for value in found if math.isfinite(value)]
        return statistics.median(values[1:] or values) if values else math.nan

    def mean_seconds(self) -> float:
        """The mean seconds of a step after the first record of the newest start; NaN if unknown.

        Saves and validations are part of it. A record counts as often as it has steps.
        """
        steps = total = 0.0
        for before, record in pairwise(self.newest):
            done = _number(record.get("step")) - _number(before.get("step"))
            seconds = done * _number(record.get("step_seconds"))
            if done > 0 and math.isfinite(seconds):
                steps, total = steps + done, total + seconds
        return total / steps if steps else self.typical("step_seconds")

    def lines(self, state: str = "running") -> list[str]:
        """Lines that say the speed, the work that is left, and the share of waiting.

        Args:
            state: what the run does, as `state_in_words` says. The time that is left is told only
                of a run that is running.
        """
        return [line for line in (self._speed(), self._left(state), self._waiting()) if line]

    def curves(self, width: int) -> list[str]:
        """A line for each curve: its name, its drawing, its last, least and greatest value.

        Args:
            width: the number of characters of a drawing.
        """
        lines: list[str] = []
        for key, name in (
            ("loss", "loss"),
            ("tokens_per_second", "tokens/s"),
            ("samples_per_second", "samples/s"),
        ):
            values = self.values(key)
            if len(values) >= LEAST_POINTS and not (name == "samples/s" and len(lines) == 2):
                finite = [value for value in values if math.isfinite(value)] or [math.nan]
                last, low, high = (_short(v) for v in (values[-1], min(finite), max(finite)))
                drawn = sparkline(values, width)
                lines.append(f"{name:<{LABEL}} {drawn} {last} ({low} to {high})")
        return lines

    def _speed(self) -> str:
        seconds = self.typical("step_seconds")
        if not seconds > 0:
            return ""
        for key in ("tokens", "samples"):
            rate = self.typical(f"{key}_per_second")
            if math.isfinite(rate):
                return f"speed: {time_text(seconds)} per step, {in_three_digits(rate)} {key}/s"
        return f"speed: {time_text(seconds)} per step"

    def _left(self, state: str) -> str:
        seconds, step, end = self.mean_seconds(), self.last.get("step"), self.steps
        if not isinstance(step, int) or not end or not seconds > 0:
            return ""
        if step >= end:
            return f"all of its {plural(end, 'step is', 'steps are')} done"
        if state.startswith("finished"):  # by run.patience or `loop.stop()`
            return f"ended after {step} of {plural(end, 'step')}"
        about = f", about {time_text((end - step) * seconds)}" if state == "running" else ""
        return f"left: {end - step} of {plural(end, 'step')}{about}"

    def _waiting(self) -> str:
        seconds = self.typical("step_seconds")
        shares = [
            f"{min(1.0, self.typical(key) / seconds):.0%} for {what}"
            for key, what in WAITS
            if seconds > 0 and math.isfinite(self.typical(key))
        ]
        return f"waiting of rank 0: {', '.join(shares)}" if shares else ""


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _whole_numbers(events: Iterable[dict[str, Any]], key: str) -> Iterator[int]:
    return (event[key] for event in events if isinstance(event.get(key), int))


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def _mean(values: Sequence[float]) -> float:
    """The mean of finite values, which does not overflow; NaN if there are none."""
    if not values:
        return math.nan
    half = math.fsum(value / (2 * len(values)) for value in values)
    return min(max(2 * half, min(values)), max(values))


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values in one line of block characters.

    Args:
        values: the values. Where there are more than characters, a character stands for the mean of
            its part. A part without a finite value is a blank.
        width: the number of characters at most.
    """
    parts = min(width, len(values))
    means = []
    for place in range(parts):
        part = values[place * len(values) // parts : (place + 1) * len(values) // parts]
        finite = [value for value in part if math.isfinite(value)]
        means.append(_mean(finite))
    finite = [value for value in means if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    middle = (len(BLOCKS) - 1) // 2
    drawn = ""
    for value in means:
        if not math.isfinite(value):
            drawn += " "
        elif high > low:
            share = (value / 2 - low / 2) / (high / 2 - low / 2)  # high - low may be infinite
            drawn += BLOCKS[round(share * (len(BLOCKS) - 1))]
        else:
            drawn += BLOCKS[middle]
    return drawn


def _configured_steps(run: Path) -> int:
    with suppress(OSError, ValueError, yaml.YAMLError, TypeError, LookupError, RecursionError):
        text = (run / "config.yaml").read_text(encoding="utf-8")
        steps = yaml.safe_load(text)["run"]["steps"]
        return steps if isinstance(steps, int) else 0
    return 0
