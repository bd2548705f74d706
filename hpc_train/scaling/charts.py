"""Draws the charts of a study as SVG, whose colours are classes of the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from hpc_train.mpi.phases import STEP_PHASES
from hpc_train.scaling.paragraph import in_digits, percent
from hpc_train.scaling.summary import Figures, ScaleRow
from hpc_train.times import time_text

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 16, 44  # margins
CURVE = 60  # number of points of a curve
_Place = tuple[float, float]


@dataclass(frozen=True)
class ChartFrame:
    """The area of a chart: nodes on a logarithmic axis, and a value.

    Args:
        first, last: the numbers of nodes at the ends.
        low, high: the values at the ends.
        logarithmic: whether the axis of the values is logarithmic.
    """

    first: int
    last: int
    low: float
    high: float
    logarithmic: bool = False

    def x(self, nodes: float) -> float:
        """The place of a number of nodes."""
        width = math.log(max(self.last, self.first + 1) / self.first)
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(nodes / self.first) / width

    def y(self, value: float) -> float:
        """The place of a value, which is moved to the nearest end if it lies outside."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def axes(
        self, nodes: Iterable[int], values: Iterable[float], text: Callable[[float], str]
    ) -> str:
        """Grid lines with their labels."""
        parts = [_grid_line(self.y(value), text(value)) for value in values]
        parts += [
            f'<text x="{self.x(count):.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="middle">{count}</text>'
            for count in nodes
        ]
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">nodes</text>')
        return "".join(parts)

    def path(self, kind: str, places: Sequence[_Place]) -> str:
        """A line through places, each a number of nodes and a value."""
        points = " ".join(f"{self.x(nodes):.1f},{self.y(value):.1f}" for nodes, value in places)
        return f'<polyline class="{kind}" points="{points}"/>'

    def band(self, lower: Sequence[_Place], upper: Sequence[_Place]) -> str:
        """The area between two lines."""
        places = [*lower, *reversed(upper)]
        points = " ".join(f"{self.x(nodes):.1f},{self.y(value):.1f}" for nodes, value in places)
        return f'<polygon class="band" points="{points}"/>'

    def point(self, row: ScaleRow, value: float, low: float, high: float) -> str:
        """A point with the bar of its scatter."""
        x = self.x(row.nodes)
        kind = "measured" if row.measured else "predicted"
        value_text, low_text, high_text = map(in_digits, (value, low, high))
        label = escape(f"{row.nodes} nodes: {value_text} ({kind}, {low_text} to {high_text})")
        return (
            f'<line class="error" x1="{x:.1f}" x2="{x:.1f}" y1="{self.y(low):.1f}" '
            f'y2="{self.y(high):.1f}"/><circle class="{kind}" cx="{x:.1f}" '
            f'cy="{self.y(value):.1f}" r="4.5"><title>{label}</title></circle>'
        )


def speedup_chart(figures: Figures) -> Markup:
    """Speed-up over nodes: measured, fitted, predicted, and in proportion to the nodes."""
    rows, (first, last) = figures.rows, _ends(figures)
    ideal_ends = [(nodes, nodes / rows[0].nodes) for nodes in (first, last)]
    highest = max(ideal_ends[1][1], *(row.speedup for row in rows), 2.0)
    lowest = min(ideal_ends[0][1], *(row.speedup for row in rows))
    low, high = (2.0 ** math.floor(math.log2(lowest)), 2.0 ** math.ceil(math.log2(highest)))
    frame = ChartFrame(first, last, low, high, logarithmic=True)
    ticks = [low * 2**power for power in range(round(math.log2(high / low)) + 1)]
    ideal = frame.path("ideal", ideal_ends)
    return _chart(
        "Speed-up over nodes", frame, figures, ticks, lambda v: f"{v:g}", ideal, scaled=True
    )


def efficiency_chart(figures: Figures) -> Markup:
    """Parallel efficiency over nodes, with the least efficiency as a line."""
    rows = figures.rows
    highest = max(1.0, *(row.efficiency for row in rows))
    high = math.ceil(highest * 5 - 1e-6) / 5
    ends = _ends(figures)
    frame = ChartFrame(*ends, 0.0, high)
    ticks = [step / 5 for step in range(round(high * 5) + 1)]
    least = frame.path("ideal", [(nodes, figures.least_efficiency) for nodes in ends])
    return _chart(
        "Parallel efficiency over nodes",
        frame,
        figures,
        ticks,
        percent,
        least,
        scaled=False,
    )


def _ends(figures: Figures) -> tuple[int, int]:
    """The smallest and the largest number of nodes, measured or predicted."""
    nodes = [row.nodes for row in figures.rows]
    return min(nodes), max(nodes)


def _chart(
    title: str,
    frame: ChartFrame,
    figures: Figures,
    ticks: Sequence[float],
    text: Callable[[float], str],
    reference: str,
    *,
    scaled: bool,
) -> Markup:
    """A chart of speed-up, or if it is not `scaled` of speed-up divided by the nodes."""
    rows, first = figures.rows, figures.rows[0]

    def value(seconds: float, nodes: float) -> float:
        if seconds <= 0:  # the model's on one node, or the low end of an interval
            return math.inf
        speedup = first.seconds / seconds * (nodes / first.nodes if figures.weak else 1.0)
        return speedup if scaled else speedup * first.nodes / nodes

    parts = [frame.axes([row.nodes for row in rows], ticks, text), reference]
    model, largest = figures.model, figures.measured[-1].nodes
    if model is not None:
        start: _Place = (largest, value(model.seconds(largest), largest))
        beyond = [row for row in figures.predicted if row.nodes > largest]
        lower = [start, *((row.nodes, value(row.high, row.nodes)) for row in beyond)]
        upper = [start, *((row.nodes, value(row.low, row.nodes)) for row in beyond)]
        parts.append(frame.band(lower, upper))
        span = [frame.first * (frame.last / frame.first) ** (i / CURVE) for i in range(CURVE + 1)]
        counts = sorted({round(one) for one in span} | {first.nodes, largest})
        curve = [(float(count), value(model.seconds(count), count)) for count in counts]
        for kind, begin, end in (
            ("further", frame.first, first.nodes),
            ("fit", first.nodes, largest),
            ("further", largest, frame.last),
        ):
            parts.append(frame.path(kind, [place for place in curve if begin <= place[0] <= end]))
    for row in rows:
        middle, low, high = (
            value(seconds, row.nodes) for seconds in (row.seconds, row.high, row.low)
        )
        parts.append(frame.point(row, middle, low, high))
    return _svg(title, parts)


def phase_chart(figures: Figures) -> Markup:
    """The time of a step on each number of nodes, divided into its phases."""
    rows = figures.measured
    highest = max(row.seconds for row in rows)
    width = (WIDTH - LEFT - RIGHT) / len(rows)
    tall = HEIGHT - TOP - BOTTOM
    parts = [
        _grid_line(HEIGHT - BOTTOM - tall * tick / highest, time_text(tick))
        for tick in _round_ticks(highest)
    ]
    for place, row in enumerate(rows):
        x, y = LEFT + width * (place + 0.2), float(HEIGHT - BOTTOM)
        known = {name: row.phases.get(name, 0.0) for name in STEP_PHASES}
        total = max(sum(known.values()), row.seconds)
        known["other"] = total - sum(known.values())
        for name, seconds in known.items():
            height = tall * seconds / total * row.seconds / highest
            y -= height
            label = escape(f"{row.nodes} nodes, {name}: {percent(seconds / total)} of the step")
            parts.append(
                f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width * 0.6:.1f}" '
                f'height="{height:.1f}"><title>{label}</title></rect>'
            )
        parts.append(
            f'<text x="{x + width * 0.3:.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="middle">{row.nodes}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">nodes</text>')
    return _svg("Seconds of a step by phase", parts)


def _grid_line(y: float, label: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _round_ticks(highest: float) -> list[float]:
    """Two to five multiples of 1, 2 or 5 times a power of ten, up to a length above 0."""
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(part * power for part in (0.2, 0.5, 1.0, 2.0) if highest <= 5 * part * power)
    return [step * count for count in range(1, math.floor(highest / step + 1e-9) + 1)]


def _svg(title: str, parts: Iterable[str]) -> Markup:
    # What the parts hold are numbers, and labels that were escaped.
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
