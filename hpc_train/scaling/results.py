"""Reads what the runs of a study have measured: their performance.json, and energy if known."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.files import lines_of
from hpc_train.monitoring.performance import PERFORMANCE

# The standard error of a median of independent normal values is 1.2533 times that of their mean,
# and their interquartile range is 1.349 standard deviations. McGill, Tukey and Larsen, "Variations
# of box plots", The American Statistician 32, 1978.
ERROR_OF_MEDIAN = 1.2533
QUARTILES_APART = 1.349


@dataclass(frozen=True)
class MeasuredRun:
    """What a run has measured after its warm-up.

    Args:
        nodes: number of nodes.
        seconds: seconds of each step that counts.
        phases: mean seconds per step of each phase on rank 0.
        told: performance.json.
        joules: energy per sample in joules; None: not known.
    """

    nodes: int
    seconds: tuple[float, ...]
    phases: Mapping[str, float]
    told: Mapping[str, Any]
    joules: float | None = None

    @property
    def median(self) -> float:
        """The median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """The standard error of that median, by the scatter of the run's own steps."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float(ERROR_OF_MEDIAN * (high - low) / QUARTILES_APART / len(self.seconds) ** 0.5)


def read_run(directory: Path, nodes: int, warmup: int) -> MeasuredRun | None:
    """The result of a run; None if it has none yet.

    Args:
        directory: the run directory.
        nodes: number of nodes that it ran on.
        warmup: number of steps at the start that do not count.
    """
    try:
        told = json.loads((directory / PERFORMANCE).read_text(encoding="utf-8"))
        seconds = dict(told["seconds"])
        steps = tuple(seconds.pop("step")[warmup:])
        phases = {name: statistics.fmean(values[warmup:]) for name, values in seconds.items()}
    except (OSError, ValueError, KeyError, TypeError, statistics.StatisticsError):
        return None  # it is not finished, or is being written
    if not steps:
        return None
    joules = joules_per_sample(lines_of(directory / "metrics.jsonl"), warmup, told["batch"])
    return MeasuredRun(nodes, steps, phases, told, joules)


def joules_per_sample(records: Iterator[dict[str, Any]], warmup: int, batch: int) -> float | None:
    """The energy per sample between the first and the last record after the warm-up.

    Args:
        records: records of metrics.jsonl; `joules` counts from the start of the run.
        warmup: number of steps at the start that do not count.
        batch: samples per step.
    """
    found = [(one["step"], one["joules"]) for one in records if one.get("joules") is not None]
    counted = [pair for pair in found if pair[0] >= warmup]
    if len(counted) < 2 or counted[-1][0] == counted[0][0]:
        return None
    (first, before), (last, after) = counted[0], counted[-1]
    return float((after - before) / ((last - first) * batch))
