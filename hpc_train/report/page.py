"""Makes the page of a report: one HTML file with all that it needs."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hpc_train.errors import some_of
from hpc_train.monitoring.spent import SpentCosts, prefixed
from hpc_train.report.comparison import compare
from hpc_train.report.curves import curves_of, keys_without_plot, plots_of
from hpc_train.report.layout import layout_of
from hpc_train.report.metrics import number
from hpc_train.report.options import config_differences
from hpc_train.report.phases import PHASES, shares
from hpc_train.report.sources import RunSource, distinct_runs, moment, read_sources
from hpc_train.times import time_text

NO_VALUE = "\N{EN DASH}"  # stands where a table has no value
NOT_FINITE = "not finite"
MOST_CURVES = 64  # runs whose curves are drawn
MOST_DETAILS = 12  # runs that have a section of their own
MOST_ROWS = 200  # runs that the summary lists
MOST_COLUMNS = 8  # runs whose differences are shown


class LiveReport:
    """A report that can be made again: it then reads only what is new in metrics.jsonl.

    Args:
        runs: run directories. A sweep stands for its tasks.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs, self.known = distinct_runs(runs), dict[Path, RunSource]()

    def html(self) -> str:
        """The page as it is now.

        Raises:
            UserError: a folder is no run directory, or a file cannot be read.
        """
        return _html(self.runs, read_sources(self.runs, self.known))


def report_of(runs: Sequence[Path]) -> str:
    """The HTML of a report on runs.

    Args:
        runs: run directories. A sweep stands for its tasks.

    Raises:
        UserError: a folder is no run directory, or cannot be read.
    """
    return LiveReport(runs).html()


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "g": plain_number,
        "si": short_number,
        "moment": moment,
        "time": known_time,
        "reached": share_of_limit,
        "exceeded": exceed_limit,
    }
    return environment.get_template("page.html")


def _html(runs: Sequence[Path], sources: Sequence[RunSource]) -> str:
    drawn = sources[:MOST_CURVES]
    compared = compare(sources)
    data: dict[str, Any] = {
        "runs": curves_of(drawn),
        "plots": plots_of(drawn),
        "phases": list(PHASES),
        "parallel": compared.axes() if compared else None,
    }
    single = [source for source in sources if source.task is None]
    configured = [source for source in sources if source.config]
    text = _template().render(
        title=some_of([run.resolve().name for run in runs]),
        made=moment(time.time()),
        sources=sources,
        summary=_summary(sources[:MOST_ROWS]),
        plots=data["plots"],
        phases=data["phases"],
        details=single[:MOST_DETAILS],
        left_out=len(sources) - len(drawn),
        without_plot=keys_without_plot(drawn),
        layouts=[layout_of(source.story.newest) for source in single[:MOST_DETAILS]],
        shares=[(place, one, shares(one)) for place, one in enumerate(drawn) if shares(one)],
        compared=compared,
        parallel=data["parallel"],
        differences=config_differences([one.config for one in configured[:MOST_COLUMNS]]),
        columns=configured[:MOST_COLUMNS],
        further=len(configured[MOST_COLUMNS:]),
        without_config=[source.name for source in sources if not source.config],
        data=Markup(embedded(data)),
    )
    # Names of files and texts from JSON may have halves of surrogate pairs, which UTF-8 has not.
    return text.encode("utf-8", "replace").decode()


def embedded(value: Any) -> str:
    """The JSON of a value, such that no text in it ends the script element or begins a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _summary(sources: Sequence[RunSource]) -> dict[str, list[str]]:
    """For each heading what the summary says about each run. Empty ones are left out."""
    cells: dict[str, list[str]] = {}
    for source in sources:
        least, step = source.least("validation_loss")
        starts = len(source.story.starts)
        row = {
            "state": source.state[:300],
            "last step": plain_number(source.last("step")),
            "last loss": plain_number(source.last_loss),
            "least validation loss": (
                f"{plain_number(least)} at step {plain_number(step)}"
                if math.isfinite(least)
                else NO_VALUE
            ),
            "mean time per step": known_time(source.mean("step_seconds")),
            "samples/s": short_number(source.mean("samples_per_second")),
            "tokens/s": short_number(source.mean("tokens_per_second")),
            "most memory of a rank": short_number(source.most("memory_gb") * 1e9, "B"),
            "starts": str(starts) if starts else NO_VALUE,
            "steps lost": source.lost if starts > 1 else NO_VALUE,
            "model TFLOP/s": plain_number(source.mean("tflops")),
            "MFU": plain_number(source.mean("mfu"), 3),
            "node-hours": plain_number(source.costs.node_hours or None),
            "energy": _energy(source.costs),
            "tokens per joule": _tokens_per_joule(source),
        }
        for heading, text in row.items():
            cells.setdefault(heading, []).append(text)
    return {heading: texts for heading, texts in cells.items() if set(texts) != {NO_VALUE}}


def _energy(costs: SpentCosts) -> str:
    words = (short_number(costs.joules or None, "J"), costs.read_in)
    return ", ".join(word for word in words if word)


def _tokens_per_joule(source: RunSource) -> str:
    """The tokens by the energy; where that was not read it is taken to be as in the other time."""
    costs = source.costs
    if not costs.joules or not costs.metered_share:
        return NO_VALUE
    return plain_number(source.last("tokens") * min(1.0, costs.metered_share) / costs.joules)


def share_of_limit(row: Mapping[str, Any]) -> str:
    """The share of its limit that an operation's bandwidth reaches, in percent."""
    bandwidth, limit = number(row.get("bandwidth")), number(row.get("limit"))
    return f"{bandwidth / limit:.0%}" if limit > 0 and math.isfinite(bandwidth) else NO_VALUE


def exceed_limit(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the bandwidth of an operation is above its limit."""
    return any(number(row.get("bandwidth")) > number(row.get("limit")) > 0 for row in rows)


def known_time(value: Any) -> str:
    """A length of time in words; a dash if there is none."""
    seconds = number(value)
    return time_text(seconds) if math.isfinite(seconds) else NO_VALUE


def plain_number(value: Any, digits: int = 4) -> str:
    """A number as the tables show it; a dash if there is none."""
    value = number(value)
    if math.isinf(value):
        return NOT_FINITE
    if not math.isfinite(value):
        return NO_VALUE
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def short_number(value: Any, unit: str = "") -> str:
    """A number with a prefix of its unit, such as 1.2 GB/s; a dash if there is none."""
    value = number(value)
    return prefixed(value, unit) if math.isfinite(value) else NO_VALUE
