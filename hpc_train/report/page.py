"""Makes the page of a report: one HTML file with all that it needs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hpc_train.report.comparison import compare
from hpc_train.report.curves import curves_of, plots_of
from hpc_train.report.layout import layout_of
from hpc_train.report.metrics import number
from hpc_train.report.options import differences
from hpc_train.report.phases import PHASES, shares
from hpc_train.report.sources import RunSource, duration, moment, sources_of

NONE = "\N{EN DASH}"  # stands where a table has no value
MOST_CURVES = 64  # runs whose curves are drawn
MOST_DETAILS = 12  # runs that have a section of their own
MOST_COLUMNS = 24  # runs whose differences are shown


class LiveReport:
    """A report that can be made again: it then reads only what is new in metrics.jsonl.

    Args:
        runs: run directories. A sweep stands for its tasks.

    Raises:
        UserError: a folder is no run directory, or cannot be read.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        self.sources = sources_of(runs)

    def html(self) -> str:
        """The page as it is now.

        Raises:
            UserError: a file cannot be read.
        """
        for source in self.sources:
            source.read()
        return _html(self.sources)


def report_of(runs: Sequence[Path]) -> str:
    """The HTML of a report on runs.

    Args:
        runs: run directories. A sweep stands for its tasks.

    Raises:
        UserError: a folder is no run directory, or cannot be read.
    """
    return _html(sources_of(runs))


def _html(sources: Sequence[RunSource]) -> str:
    drawn = sources[:MOST_CURVES]
    compared = compare(sources)
    data: dict[str, Any] = {
        "runs": curves_of(drawn),
        "plots": plots_of(drawn),
        "phases": list(PHASES),
        "parallel": compared.axes() if compared else None,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"g": figure, "moment": moment, "duration": duration, "si": scaled}
    environment.filters["used"] = used
    single = [source for source in sources if source.task is None]
    text = environment.get_template("page.html").render(
        title=_title(sources),
        made=moment(time.time()),
        sources=sources,
        plots=data["plots"],
        phases=data["phases"],
        details=single[:MOST_DETAILS],
        left_out=len(sources) - len(drawn),
        layouts=[layout_of(source.story.newest) for source in single[:MOST_DETAILS]],
        shares=[(place, one, shares(one)) for place, one in enumerate(drawn) if shares(one)],
        compared=compared,
        differences=differences([source.config for source in sources[:MOST_COLUMNS]]),
        columns=sources[:MOST_COLUMNS],
        data=Markup(embedded(data)),
    )
    # Names of files and texts from JSON may have halves of surrogate pairs, which UTF-8 has not.
    return text.encode("utf-8", "replace").decode()


def _title(sources: Sequence[RunSource]) -> str:
    names = ", ".join(source.name for source in sources[:3])
    return names + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")


def embedded(value: Any) -> str:
    """The JSON of a value, such that no text in it ends the script element or begins a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def used(row: Mapping[str, Any]) -> str:
    """The share of its limit that an operation's bandwidth reaches, in percent."""
    bandwidth, limit = number(row.get("bandwidth")), number(row.get("limit"))
    return f"{bandwidth / limit:.0%}" if limit > 0 and math.isfinite(bandwidth) else NONE


def figure(value: Any, digits: int = 4) -> str:
    """A number as the tables show it; a dash if there is none."""
    value = number(value)
    if not math.isfinite(value):
        return NONE
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.{digits}g}"


def scaled(value: Any, unit: str = "") -> str:
    """A number with a prefix of its unit, such as 1.2 GB/s; a dash if there is none."""
    value = number(value)
    if not math.isfinite(value):
        return NONE
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".strip()
