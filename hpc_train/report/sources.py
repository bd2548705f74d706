"""Gathers what the report says about one run directory."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from hpc_train.launch.alive import job_runs
from hpc_train.launch.queued import TASKS, read_tasks
from hpc_train.launch.status import check_run
from hpc_train.launch.supervise import START
from hpc_train.monitoring.spent import costs_in
from hpc_train.report.decimation import BUCKETS
from hpc_train.report.metrics import Metrics
from hpc_train.report.options import read_config, words_as_options
from hpc_train.report.story import reached_last, read_samples, read_story
from hpc_train.times import time_text

FEW_RUNS = 8  # that are drawn finely
RECENT_SECONDS = 3600.0  # after which a run without an end has probably been killed
COARSE = BUCKETS // 8  # buckets of a curve of many runs


class RunSource:
    """A run directory, and what was read there.

    Args:
        path: the run directory.
        name: what the report calls it.
        buckets: most buckets of a curve.
        task: the options of the task of a sweep that it is; None if it is none.

    Attributes:
        runs: whether a job ran there when it was read; None if that is not known.
    """

    def __init__(
        self, path: Path, name: str, buckets: int, task: dict[str, str] | None = None
    ) -> None:
        self.path, self.name, self.task = path, name, task
        self.metrics = Metrics(path / "metrics.jsonl", buckets)

    def read(self) -> None:
        """Read what is new.

        Raises:
            UserError: metrics.jsonl cannot be read.
        """
        self.story = read_story(self.path)
        trained = [start for start in self.story.starts if start.after is not None]
        resumed: list[float] = []
        for start in trained:  # each one drops the records of later steps
            after = start.after or 0
            resumed = [*(step for step in resumed if step < after), after]
        self.metrics.update(resumed)
        self.runs = job_runs(self.path)
        self.costs = costs_in(self.path)
        for newest in trained[-1:]:
            if self.last("step") > (newest.after or 0):  # else it is a record of an earlier start
                reached_last(newest, self.last("step"), self.last("time"))
        self.text, self.config = read_config(self.path)
        self.samples = read_samples(self.path)

    def last(self, key: str) -> float:
        """The last value of a key; NaN if there is none."""
        curve = self.metrics.decimation.curves.get(key)
        return curve.last[0] if curve else math.nan

    def least(self, key: str) -> tuple[float, float]:
        """The least value of a key and its step; NaN if there is none."""
        curve = self.metrics.decimation.curves.get(key)
        return curve.least if curve else (math.nan, math.nan)

    @property
    def last_loss(self) -> float:
        """The last loss; infinite if it was infinite or not a number, NaN if there is none."""
        curve = self.metrics.decimation.curves.get("loss")
        loss, step = curve.last if curve else (math.nan, -math.inf)
        _, _, diverged = self.metrics.not_finite.get("loss", (0, 0.0, -math.inf))
        return math.inf if diverged > step else loss

    def mean(self, key: str) -> float:
        """The mean of a key over the steps, as `StepMeans` has it; NaN if there is none."""
        return self.metrics.means.mean(key)

    def most(self, key: str) -> float:
        """The greatest value of a key; NaN if there is none."""
        curve = self.metrics.decimation.curves.get(key)
        values = curve.high[curve.count > 0] if curve else np.empty(0)
        return float(values.max()) if len(values) else math.nan

    @property
    def begin(self) -> float:
        """Seconds since 1970 at which the run began: its first start or its first record."""
        curve = self.metrics.decimation.curves.get("time")
        times = [start.time for start in self.story.starts[:1] if start.time]
        if curve is not None:
            times += [float(value) for value in curve.low[:1] if math.isfinite(value)]
        return min(times, default=0.0)

    @property
    def state(self) -> str:
        """What the run does, in words."""
        starts, last = self.story.starts, self.last("time")
        if starts and starts[-1].ended is not None and not self.runs:
            return starts[-1].cause or "ended"
        if starts and starts[-1].after is None and time.time() - starts[-1].time < START:
            return "starting"  # an attempt of the launcher, which it has begun and not ended
        ago = max(0.0, time.time() - last) if math.isfinite(last) else math.inf
        if self.runs is None and not starts and not self.metrics.decimation.records:
            return "no start is recorded"
        unknown = self.runs is None and ago < RECENT_SECONDS
        words = ["running" if self.runs else "no end is recorded"] if not unknown else []
        if math.isfinite(last):
            recent = f"last record {time_text(ago)} before this page was made"
            words.append(recent if ago < RECENT_SECONDS else f"last record at {moment(last)}")
        return "; ".join(words)

    @property
    def lost(self) -> str:
        """The number of finished steps that restarts have repeated, as far as it is known."""
        repeated = [start.lost for start in self.story.starts if start.followed]
        known = sum(lost or 0 for lost in repeated)
        if None not in repeated:
            return str(known)
        return f"at least {known}" if known else "unknown"


def moment(seconds: float) -> str:
    """A time in words, in UTC; "" if it is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def distinct_runs(runs: Sequence[Path]) -> list[Path]:
    """The folders, without those that were given before by another name."""
    found: dict[Path, Path] = {}
    for run in runs:
        found.setdefault(run.resolve(), run)
    return list(found.values())


def read_sources(runs: Sequence[Path], known: dict[Path, RunSource]) -> list[RunSource]:
    """Read run directories. A sweep is read as its tasks.

    Args:
        runs: run directories, each once.
        known: those that were read before; gets those that are new.

    Raises:
        UserError: a folder is no run directory, or a file cannot be read.
    """
    found: list[tuple[Path, str, dict[str, str] | None]] = []
    for run in runs:
        folders = [path for path in run.glob("task-*") if path.is_dir()]
        if not (folders and (run / TASKS).exists()):
            check_run(run)
            found.append((run, "", None))
        options = read_tasks(run) if folders else {}
        for path in sorted(folders, key=lambda path: (len(path.name), path.name)):
            words = options.get(path.name.removeprefix("task-"), [])
            found.append((path, path.name, words_as_options(words)))
    buckets = BUCKETS if len(found) <= FEW_RUNS else COARSE
    several = len(runs) > 1
    names = [run.resolve().name for run in runs]
    sources = []
    for path, name, task in found:
        run = path if task is None else path.parent
        of_run = str(run) if names.count(run.resolve().name) > 1 else run.resolve().name
        if task is None or several:
            name = of_run if task is None else f"{of_run}/{name}"
        if path not in known:
            known[path] = RunSource(path, name, buckets, task)
        known[path].read()
        sources.append(known[path])
    return sources
