"""Compares the tasks of a sweep, or several runs, by their options and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.report.options import config_differences
from hpc_train.report.sources import RunSource

FEWEST_RUNS = 3  # runs that are compared, unless they are tasks of a sweep
MOST_OPTIONS = 12
MOST_LINES = 1000


@dataclass
class Compared:
    """Runs, the best first.

    Args:
        options: the keys in which they differ.
        results: the names of the results, the one that they are sorted by first.
        rows: for each run its name, its options and its results: infinite if not finite, NaN if
            there is none.
    """

    options: list[str]
    results: list[str]
    rows: list[tuple[str, list[str], list[float]]]

    def axes(self) -> dict[str, Any] | None:
        """The axes of parallel coordinates, the result that counts last.

        What has one value only has no axis. None: nothing differs.
        """
        rows = self.rows[:MOST_LINES]
        axes: list[dict[str, Any]] = []
        for number, key in enumerate(self.options):
            words = [options[number][:200] for _, options, _ in rows]
            axes.append({"label": key, "values": _numbers(words) or words})
        axes = [axis for axis in axes if _differ(axis["values"])][:MOST_OPTIONS]
        for number in reversed(range(len(self.results))):
            values = [found[number] for _, _, found in rows]
            known = [value if math.isfinite(value) else None for value in values]
            if _differ(known):
                axes.append({"label": self.results[number], "values": known})
        return {"names": [name for name, _, _ in rows], "axes": axes} if axes else None


def _differ(values: Sequence[Any]) -> bool:
    return len({value for value in values if value is not None}) > 1


def _numbers(words: Sequence[str]) -> list[float | None] | None:
    """The words as numbers, and None where a run has no such option; None if one is no number."""
    try:
        found = [float(word) if word else None for word in words]
    except ValueError:
        return None
    return found if all(value is None or math.isfinite(value) for value in found) else None


def compare(sources: Sequence[RunSource]) -> Compared | None:
    """Compare runs; None if there is nothing to compare.

    A run whose last loss is not finite has diverged. It comes after those that have not.
    """
    tasks = [source for source in sources if source.task is not None]
    chosen = tasks or list(sources)
    if len(chosen) < (1 if tasks else FEWEST_RUNS):
        return None
    if tasks:
        keys = list(dict.fromkeys(key for source in tasks for key in source.task or {}))
        values = [[(source.task or {}).get(key, "") for key in keys] for source in tasks]
    else:
        differing = config_differences([source.config for source in chosen])
        keys = list(differing)
        values = [[differing[key][number] for key in keys] for number in range(len(chosen))]
    results = {
        "least validation loss": [source.least("validation_loss")[0] for source in chosen],
        "last loss": [source.last_loss for source in chosen],
        "s per step": [source.mean("step_seconds") for source in chosen],
        "last step": [source.last("step") for source in chosen],
    }
    known = [name for name, found in results.items() if not all(map(math.isnan, found))]
    rows = [
        (source.name, values[number], [results[name][number] for name in known])
        for number, source in enumerate(chosen)
    ]

    def place(number: int) -> tuple[bool, float]:
        first = results[known[0]][number] if known else math.nan
        diverged = math.isinf(results["last loss"][number])
        return diverged, math.inf if math.isnan(first) else first

    return Compared(keys, known, [rows[number] for number in sorted(range(len(rows)), key=place)])
