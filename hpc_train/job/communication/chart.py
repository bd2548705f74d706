"""The figures of `hpc-train info collectives` as a drawing that opens without a network.

Each row has two plots of one operation over the size: its time, and its bus bandwidth, all on
logarithmic axes. A point shows its numbers when the pointer is on it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from html import escape

from hpc_train.errors import plural, size_text
from hpc_train.job.communication.figures import (
    BARE,
    HALVING,
    HOROVOD,
    IMPLEMENTATIONS,
    MPI,
    PIPELINE,
    RING,
    SCOPES,
    SHARED,
    CollectiveFigure,
)
from hpc_train.times import time_text

# The eight colours of Okabe and Ito, "Color universal design", 2008, without yellow.
COLOURS = {
    BARE: "var(--ink)",
    MPI: "#0072b2",
    SHARED: "#d55e00",
    RING: "#009e73",
    HALVING: "#cc79a7",
    PIPELINE: "#e69f00",
    HOROVOD: "#56b4e9",
}
WIDTH, PLOT_WIDTH, PLOT_HEIGHT = 960, 380, 190
LEFT, BETWEEN, LINE = 60, 90, 18
ROW_HEIGHT = PLOT_HEIGHT + 84
STYLE = """
svg { --paper: #ffffff; --ink: #1d2733; --faint: #647382; --line: #d9dee4;
  background: var(--paper); font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --paper: #14181d; --ink: #e8edf2; --faint: #94a1ae;
  --line: #333c46; } }
text { fill: var(--ink); } .faint { fill: var(--faint); } .grid { stroke: var(--line); }
.big { font-size: 17px; font-weight: 600; } .head { font-size: 14px; font-weight: 600; }
"""

Scale = Callable[[float], float]


def svg(figures: Sequence[CollectiveFigure], title: str, lines: Sequence[str]) -> str:
    """The drawing as SVG.

    Args:
        figures: what to draw; barriers have no size and are left out.
        title: the first line.
        lines: what stands below it, such as warnings.
    """
    drawn = [figure for figure in figures if figure.nbytes]
    rows = list(dict.fromkeys((figure.scope, figure.operation) for figure in drawn))
    names = [name for name in IMPLEMENTATIONS if any(f.implementation == name for f in drawn)]
    wrapped = [part for line in lines for part in textwrap.wrap(line, 140, break_long_words=False)]
    top = 34 + LINE * len(wrapped) + 14
    height = top + LINE * len(names) + 20 + ROW_HEIGHT * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="big" x="{LEFT - 40}" y="28">{escape(title)}</text>',
    ]
    for number, line in enumerate(wrapped):
        parts.append(f'<text x="{LEFT - 40}" y="{50 + LINE * number}">{escape(line)}</text>')
    for number, name in enumerate(names):
        y = top + 8 + LINE * number
        parts.append(f'<circle cx="{LEFT - 34}" cy="{y - 4}" r="4" fill="{COLOURS[name]}"/>')
        parts.append(
            f'<text x="{LEFT - 22}" y="{y}">{name}: {escape(IMPLEMENTATIONS[name])}</text>'
        )
    begin = top + LINE * len(names) + 20
    for number, (scope, operation) in enumerate(rows):
        mine = [f for f in drawn if (f.scope, f.operation) == (scope, operation)]
        y = begin + ROW_HEIGHT * number
        head = f"{operation}, {SCOPES[scope]} ({plural(mine[0].ranks, 'rank')})"
        parts.append(f'<text class="head" x="{LEFT - 40}" y="{y + 16}">{escape(head)}</text>')
        parts += _plot(mine, LEFT, y + 44, "time", lambda f: f.seconds, time_text)
        x = LEFT + PLOT_WIDTH + BETWEEN
        what = "bus bandwidth, GB/s"
        parts += _plot(mine, x, y + 44, what, lambda f: f.bus_bandwidth / 1e9, _plain)
    return "\n".join([*parts, "</svg>"]) + "\n"


def chart_page(drawing: str) -> str:
    """A page of HTML with the drawing in it, which needs no other file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Collectives</title>'
        '<meta name="viewport" content="width=device-width"><style>body { margin: 0; '
        "color-scheme: light dark; } svg { display: block; max-width: 1100px; margin: auto; }"
        f"</style></head><body>\n{drawing}</body></html>\n"
    )


def _plot(
    figures: Sequence[CollectiveFigure],
    left: float,
    top: float,
    what: str,
    value: Callable[[CollectiveFigure], float],
    words: Callable[[float], str],
) -> list[str]:
    """One plot of a value; its upper left corner is at (left, top), and `what` stands above it."""
    bottom = top + PLOT_HEIGHT
    sizes = sorted({figure.nbytes for figure in figures})
    lowest, highest = _decades([value(figure) for figure in figures])
    x = _scale(sizes[0], sizes[-1], left, left + PLOT_WIDTH)
    y = _scale(10.0**lowest, 10.0**highest, bottom, top)
    parts = [f'<text class="faint" x="{left - 40}" y="{top - 8}">{what}</text>']
    for power in range(lowest, highest + 1):
        at = y(10.0**power)
        parts.append(_line(left, at, left + PLOT_WIDTH, at))
        label = words(10.0**power)
        parts.append(
            f'<text class="faint" text-anchor="end" x="{left - 6}" y="{at + 4}">{label}</text>'
        )
    for size in sizes[:: math.ceil(len(sizes) / 6)]:
        parts.append(_line(x(size), top, x(size), bottom))
        parts.append(
            f'<text class="faint" text-anchor="middle" x="{x(size):.1f}" y="{bottom + 16}">'
            f"{size_text(size)}</text>"
        )
    for name, colour in COLOURS.items():
        mine = sorted((f for f in figures if f.implementation == name), key=lambda f: f.nbytes)
        places = [(x(figure.nbytes), y(value(figure))) for figure in mine]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        if len(places) > 1:
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
            )
        for (across, down), figure in zip(places, mine, strict=True):
            told = f"{name}, {size_text(figure.nbytes)}: {what} {words(value(figure))}"
            parts.append(
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.2" fill="{colour}">'
                f"<title>{escape(told)}</title></circle>"
            )
    return parts


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten that enclose the values, at least one decade."""
    lowest = math.floor(math.log10(min(values)))
    return lowest, max(lowest + 1, math.ceil(math.log10(max(values))))


def _scale(first: float, last: float, begin: float, end: float) -> Scale:
    """Maps first to begin and last to end, by logarithms; all to the middle if they are equal."""
    width = math.log(last / first)
    if not width:
        return lambda value: (begin + end) / 2
    return lambda value: begin + (end - begin) * math.log(value / first) / width
