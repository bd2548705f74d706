"""The curves that a page draws, as the page's script reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hpc_train.errors import plural
from hpc_train.report.decimation import Floats
from hpc_train.report.metrics import AMOUNTS
from hpc_train.report.phases import PHASES, divided
from hpc_train.report.sources import RunSource

MOST_NUMBERS = 180_000  # that a page has in all, about
LEAST_BUCKETS = 32
FINE_PLOTS = 6  # runs that have a plot of their phases each
MARKS_SHOWN = 200  # of a run
MOST_OTHER = 24  # plots of keys that the report does not know


@dataclass(frozen=True)
class Plot:
    """A plot of one key over all runs."""

    key: str
    title: str
    unit: str = ""
    group: str = "learning"
    smooth: bool = False
    zero: bool = True  # whether the axis begins at 0
    log: bool = False  # whether a logarithmic axis makes sense


KNOWN = (
    Plot("loss", "Loss", smooth=True, zero=False, log=True),
    Plot("validation_loss", "Validation loss", zero=False, log=True),
    Plot("grad_norm", "Gradient norm", smooth=True, log=True),
    Plot("lr", "Learning rate"),
    Plot("tokens_per_second", "Throughput", "tokens/s", "speed", smooth=True),
    Plot("samples_per_second", "Throughput", "samples/s", "speed", smooth=True),
    Plot("step_seconds", "Time per step", "s", "speed", smooth=True),
    Plot("memory_gb", "Memory of the rank that uses most", "GB", "speed"),
    Plot("slow_seconds", "Time that a step loses by a slow rank", "s", "speed"),
    Plot("tflops", "Model FLOP/s of the job", "TFLOP/s", "costs", smooth=True),
    Plot("mfu", "Share of the measured peak (MFU)", "", "costs", smooth=True),
    Plot("joules", "Energy", "J", "costs"),
    Plot("node_hours", "Node-hours", "h", "costs"),
)
X_AXES = ("step", "time", *AMOUNTS)
NO_PLOT = {*X_AXES, *(key for key in PHASES.values() if key), "restarts", "lost_steps"}


def plots_of(sources: Sequence[RunSource]) -> list[dict[str, Any]]:
    """The plots for which a run has values, those of known keys first."""
    keys = _keys(sources)
    plots = [plot for plot in KNOWN if plot.key in keys]
    scores, rest = _others(keys)
    place = sum(plot.key in ("loss", "validation_loss") for plot in plots)
    plots[place:place] = [_score(key) for key in scores[:MOST_OTHER]]
    plots += [Plot(key, key, group="others", zero=False) for key in rest[:MOST_OTHER]]
    return [asdict(plot) for plot in plots]


def keys_without_plot(sources: Sequence[RunSource]) -> int:
    """The number of keys that have a curve but no plot, because there are too many."""
    return sum(len(keys[MOST_OTHER:]) for keys in _others(_keys(sources)))


def _keys(sources: Sequence[RunSource]) -> list[str]:
    keys = (key for source in sources for key in source.metrics.decimation.curves)
    return list(dict.fromkeys(keys))


def _others(keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """The keys that the report does not know: scores, and all others."""
    known = {plot.key for plot in KNOWN} | NO_PLOT
    others = [key for key in keys if key not in known]
    scores = [key for key in others if key.startswith("validation_")]
    rest = [key for key in others if key not in scores]
    return scores, sorted(rest, key=lambda key: key.startswith("mixture_share_"))  # may be many


def _score(key: str) -> Plot:
    name = key.removeprefix("validation_").replace("_", " ")
    return Plot(key, f"Validation {name}", zero=False)


def curves_of(sources: Sequence[RunSource]) -> list[dict[str, Any]]:
    """For each run its name, the places of its buckets on each x axis, its series and its marks."""
    shown = [plot["key"] for plot in plots_of(sources)]
    each = MOST_NUMBERS // max(1, len(sources) * (len(X_AXES) + 3 * len(shown) + len(PHASES)))
    most = max(LEAST_BUCKETS, each)
    return [_run(source, shown, most, number < FINE_PLOTS) for number, source in enumerate(sources)]


def _run(source: RunSource, shown: Sequence[str], most: int, fine: bool) -> dict[str, Any]:
    curves, width = source.metrics.decimation.used(most)
    begin = source.begin
    places = {key: curves[key].high for key in X_AXES if key in curves}
    if "time" in places:
        places["time"] = places["time"] - begin
    series = {}
    for key in shown:
        if key in curves:
            curve = curves[key]
            series[key] = {"mean": _rounded(curve.mean())}
            if width > 1:
                series[key] |= {"low": _rounded(curve.low), "high": _rounded(curve.high)}
    return {
        "name": source.name,
        "x": {key: _rounded(values, 9) for key, values in places.items()},
        "series": series,
        "phases": {phase: _rounded(v, 4) for phase, v in divided(curves).items()} if fine else {},
        "marks": _marks(source, begin),
    }


def _rounded(values: Floats, digits: int = 5) -> list[float | int | None]:
    """Numbers with few digits, which take less space; None where there is none."""
    found: list[float | int | None] = []
    for value in values.tolist():
        if not np.isfinite(value):
            found.append(None)
            continue
        short = float(f"{value:.{digits}g}")
        found.append(int(short) if short.is_integer() and abs(short) < 1e15 else short)
    return found


def _marks(source: RunSource, begin: float) -> list[dict[str, Any]]:
    """The restarts: at which step and time, how many steps were lost before, and why."""
    trained = [start for start in source.story.starts if start.after is not None]
    marks = []
    for before, start in pairwise(trained):
        cause = before.cause or "no end was recorded"
        lost = f"; {plural(before.lost, 'step')} lost" if before.lost else ""
        marks.append(
            {
                "step": start.after,
                "time": round(start.time - begin, 3),
                "lost": before.lost or 0,
                "text": f"restart after step {start.after}: {cause}{lost}"[:300],
            }
        )
    return marks[-MARKS_SHOWN:]
