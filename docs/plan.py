"""Draws docs/plan.svg: the parts of hpc_train on the floors of the import rules, and their imports.

    python -m docs.plan

The floors are the contract `layers` in setup.cfg. The arrows are the imports of the modules. An
arrow is left out where other arrows lead to the same box (the transitive reduction), because all
arrows would be twice as many.

The drawing follows Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical
system structures", IEEE Transactions on Systems, Man, and Cybernetics 11, 1981. A long arrow has a
place on each floor that it passes, and all long arrows to one box share their places. The places of
a floor are ordered so that few arrows cross. Then they are moved so that arrows are straight.
Nothing depends on chance, so the same imports give the same bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from configparser import ConfigParser
from dataclasses import dataclass, field
from html import escape
from itertools import combinations, pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "plan.svg"
PACKAGE = "hpc_train"
WIDTHS = ((330, 118), (800, 122), (2700, 132), (math.inf, 146))  # of a box with at most these lines
PASSAGE = 10  # the width of an arrow that passes a floor
HEIGHT, FLOOR, GAP, MARGIN = 40, 86, 10, 26

STYLE = """
.plan { --paper: #ffffff; --band: #f4f5f7; --ink: #1d2733; --faint: #7b8794; --line: #8794a3;
  --box: #dbe7f5; --edge: #5b7ea6; --login: #e3efdc; --login-edge: #6c9457; }
@media (prefers-color-scheme: dark) { .plan { --paper: #14181d; --band: #1b2027; --ink: #e8edf2;
  --faint: #8c97a3; --line: #6f7c8a; --box: #22364d; --edge: #6f9bcc; --login: #26381f;
  --login-edge: #84b06c; } }
.plan text { font: 17px ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: var(--ink);
  text-anchor: middle; dominant-baseline: central; }
.plan .floor { font-size: 14px; fill: var(--faint); }
.plan .paper { fill: var(--paper); } .plan .band { fill: var(--band); }
.plan .box rect { fill: var(--box); stroke: var(--edge); }
.plan .login rect { fill: var(--login); stroke: var(--login-edge); }
.plan .arrow { fill: none; stroke: var(--line); stroke-width: 1.3; }
.plan .head { fill: var(--line); }
"""


@dataclass(eq=False)
class Place:
    """A box, or the place where an arrow passes a floor.

    Args:
        floor: counted from the top.
        width: in the picture's units.
        name: of the box; "" for an arrow.
    """

    floor: int
    width: int
    name: str = ""
    x: float = 0.0
    above: list[Place] = field(default_factory=list)
    below: list[Place] = field(default_factory=list)


def contract(name: str, key: str) -> list[str]:
    """The lines of a key of one of the import rules."""
    rules = ConfigParser()
    rules.read(ROOT / "setup.cfg")
    return rules[f"importlinter:contract:{name}"][key].split("\n")[1:]


def imports() -> dict[str, set[str]]:
    """By the name of each box: the boxes that it imports."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    found: dict[str, set[str]] = defaultdict(set)
    for module in graph.modules - {PACKAGE}:
        one = module.split(".")[1]
        others = graph.find_modules_directly_imported_by(module) - {PACKAGE}
        found[one] |= {other.split(".")[1] for other in others} - {one}
    return found


def reduced(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows without those whose end another way leads to as well."""

    def reach(start: str) -> set[str]:
        return arrows[start].union(*map(reach, arrows[start]))

    kept = []
    for start in sorted(arrows):
        further = set().union(*map(reach, arrows[start]))
        kept += [(start, end) for end in sorted(arrows[start] - further)]
    return kept


def width_of(name: str) -> int:
    """How wide a box is: by steps, so that few commits change the picture."""
    path = ROOT / PACKAGE / name
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    return next(width for most, width in WIDTHS if lines <= most)


def placed(names: list[list[str]], arrows: list[tuple[str, str]]) -> list[list[Place]]:
    """The places on each floor, in an order in which few arrows cross."""
    floors = [[Place(floor, width_of(n), n) for n in row] for floor, row in enumerate(names)]
    places = {(box.name, box.floor): box for row in floors for box in row}
    floor_of = {box.name: box.floor for row in floors for box in row}
    for start, end in arrows:
        upper = places[start, floor_of[start]]
        while upper.floor < floor_of[end]:
            floor = upper.floor + 1
            if (end, floor) not in places:
                places[end, floor] = Place(floor, PASSAGE)
                floors[floor].append(places[end, floor])
            lower = places[end, floor]
            if lower not in upper.below:
                upper.below.append(lower)
                lower.above.append(upper)
            upper = lower
    best, fewest = [list(row) for row in floors], crossings(floors)
    for sweep in range(40):
        order = floors if sweep % 2 else floors[::-1]
        for row in order:
            at = {id(place): number for some in floors for number, place in enumerate(some)}
            row.sort(key=lambda place: middle(place.above if sweep % 2 else place.below, at))
        swap_neighbours(floors)
        if (count := crossings(floors)) < fewest:
            best, fewest = [list(row) for row in floors], count
    return best


def middle(others: list[Place], at: dict[int, int]) -> float:
    """The mean of some places' numbers on their floor."""
    return sum(at[id(other)] for other in others) / len(others) if others else 0.0


def swap_neighbours(floors: list[list[Place]]) -> None:
    """Exchange neighbours on a floor as long as fewer arrows cross."""
    at = {id(place): number for row in floors for number, place in enumerate(row)}
    better = True
    while better:
        better = False
        for row in floors:
            for number in range(len(row) - 1):
                one, two = row[number], row[number + 1]
                if crossed(two, one, at) < crossed(one, two, at):
                    row[number], row[number + 1] = two, one
                    at[id(one)], at[id(two)] = number + 1, number
                    better = True


def crossed(left: Place, right: Place, at: dict[int, int]) -> int:
    """The crossings of two neighbours' arrows."""
    ways = ((left.above, right.above), (left.below, right.below))
    return sum(at[id(a)] > at[id(b)] for one, two in ways for a in one for b in two)


def crossings(floors: list[list[Place]]) -> int:
    """How often arrows cross."""
    at = {id(place): number for row in floors for number, place in enumerate(row)}
    pairs = (pair for row in floors for pair in combinations(row, 2))
    return sum(at[id(a)] > at[id(b)] for one, two in pairs for a in one.below for b in two.below)


def straighten(floors: list[list[Place]]) -> None:
    """Move places so that arrows are short and straight, in their order and with gaps."""
    for row in floors:
        for left, right in pairwise(row):
            right.x = left.x + apart(left, right)
    slack = 300.0
    for sweep in range(600):
        for row in floors if sweep % 2 else floors[::-1]:
            settle(row, [target(place, slack) for place in row])
        slack *= 0.985
    left = min(place.x - place.width / 2 for row in floors for place in row)
    for row in floors:
        for place in row:
            place.x += 2 * MARGIN - left


def target(place: Place, slack: float) -> tuple[float, float]:
    """Where a place is to be, and how much that counts: near to what it is joined with.

    Between boxes the squares of the distances are made small. Along a long arrow their roots are,
    so that it has one bend rather than a small one on each floor; at first, while `slack` is large,
    it may still move anywhere.
    """
    others = [*place.above, *place.below]
    if not others:
        return place.x, 1.0
    weights = []
    for other in others:
        distance = 1 + slack + abs(place.x - other.x)
        both = place.name and other.name
        weights.append(1 / 60 if both else 8 / (distance * math.sqrt(distance)))
    total = sum(w * other.x for w, other in zip(weights, others, strict=True))
    return total / sum(weights), sum(weights)


def settle(row: list[Place], wanted: list[tuple[float, float]]) -> None:
    """Put places as near to where they are to be as order and gaps allow: least squares.

    With the gaps taken away this is isotonic regression, by pooling adjacent violators.
    """
    offset, pools = 0.0, []
    for number, place in enumerate(row):
        offset += apart(row[number - 1], place) if number else 0.0
        x, weight = wanted[number]
        pools.append(([(place, offset)], x - offset, weight))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (first, x, m), (second, y, n) = pools[-2:]
            pools[-2:] = [(first + second, (x * m + y * n) / (m + n), m + n)]
    for members, x, _ in pools:
        for place, offset in members:
            place.x = x + offset


def apart(left: Place, right: Place) -> float:
    """The least distance of two neighbours' middles."""
    gap = GAP if left.name or right.name else 6
    return (left.width + right.width) / 2 + gap


def port(place: Place, other: Place, others: list[Place]) -> float:
    """Where an arrow meets its box: arrows to the left lie left of those to the right."""
    if not place.name:
        return place.x
    order = sorted(others, key=lambda one: one.x)
    step = min(16.0, (place.width - 24) / max(1, len(others) - 1))
    return place.x + (order.index(other) - (len(others) - 1) / 2) * step


def top(floor: int) -> int:
    """Where the boxes of a floor begin."""
    return MARGIN + floor * FLOOR


def piece(upper: Place, lower: Place) -> str:
    """An arrow from one floor to the next."""
    x, into = port(upper, lower, upper.below), port(lower, upper, lower.above)
    y, until = top(upper.floor) + HEIGHT, top(lower.floor) - (5 if lower.name else 0)
    bend = (until - y) // 2
    begin = f"M{x:.0f} {y}" if upper.name else f"M{x:.0f} {y - HEIGHT}V{y}"
    way = f"{begin}C{x:.0f} {y + bend} {into:.0f} {until - bend} {into:.0f} {until}"
    head = f'<path class="head" d="M{into:.0f} {until + 5}l-3.5 -7h7z"/>' if lower.name else ""
    return f'<path class="arrow" d="{way}"/>{head}'


def draw() -> str:
    """The picture, as SVG."""
    rows = [[name.strip() for name in line.split("|")] for line in contract("layers", "layers")]
    without = {name.removeprefix(f"{PACKAGE}.") for name in contract("login", "source_modules")}
    arrows = imports()
    floors = placed(rows, reduced(arrows))
    straighten(floors)
    places = [place for row in floors for place in row]
    width = max(place.x + place.width / 2 for place in places) + MARGIN
    height = top(len(floors) - 1) + HEIGHT + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" viewBox="0 0 {width:.0f} {height}" '
        'role="img" aria-label="The parts of hpc_train and what they import">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height}" rx="8"/>',
    ]
    for floor in range(len(floors)):
        band = f'y="{top(floor) - 8}" width="{width - 16:.0f}" height="{HEIGHT + 16}" rx="6"'
        lines.append(f'<rect class="band" x="8" {band}/>')
        number = len(floors) - 1 - floor
        lines.append(f'<text class="floor" x="22" y="{top(floor) + HEIGHT // 2}">{number}</text>')
    boxes = [place for place in places if place.name]
    lines += [piece(place, lower) for place in places for lower in place.below]
    for box in boxes:
        kind = "box login" if box.name in without else "box"
        told = ", ".join(sorted(arrows[box.name])) or "nothing of the package"
        x = f"{box.x - box.width / 2:.0f}"
        lines.append(
            f'<g class="{kind}"><title>{escape(f"{box.name} imports {told}")}</title>'
            f'<rect x="{x}" y="{top(box.floor)}" width="{box.width}" height="{HEIGHT}" rx="5"/>'
            f'<text x="{box.x:.0f}" y="{top(box.floor) + HEIGHT // 2}">{box.name}</text></g>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(f"{PICTURE} is drawn")
