"""The layout of a job as the event "start" tells it: hosts, ranks, and their places."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

MOST_RANKS = 256  # that are drawn one by one
MOST_HOSTS = 32
PLACE_AXES = ("dp", "tp", "pp")


@dataclass(frozen=True)
class PlacedRank:
    """A rank and its place along each axis."""

    rank: int
    dp: int
    tp: int
    pp: int


@dataclass
class DrawnHost:
    """A host and those of its ranks that are drawn; `count` is the number of all of them."""

    name: str
    count: int
    ranks: list[PlacedRank]


@dataclass
class Layout:
    """What is drawn of a job.

    Args:
        sizes: dp, tp and pp.
        ranks: number of ranks.
        hosts: number of hosts.
        drawn: the hosts that are drawn.
        spans: for each axis of size 2 or more, the most hosts that one of its groups lies on.
    """

    sizes: dict[str, int]
    ranks: int
    hosts: int
    drawn: list[DrawnHost] = field(default_factory=list)
    spans: dict[str, int] = field(default_factory=dict)


def layout_of(event: dict[str, Any]) -> Layout | None:
    """The layout of a job; None if the event does not say it."""
    try:
        sizes = {axis: int(event["layout"][axis]) for axis in PLACE_AXES}
        names = [str(name) for name in event["hosts"]]
        places = [tuple(int(number) for number in place) for place in event["ranks"]]
        of_host: dict[int, list[PlacedRank]] = defaultdict(list)
        for rank, (host, dp, tp, pp) in enumerate(places):
            of_host[host].append(PlacedRank(rank, dp, tp, pp))
        layout = Layout(sizes, len(places), len(names))
        left = MOST_RANKS
        for host, name in enumerate(names[:MOST_HOSTS]):
            if left <= 0:
                break
            ranks = of_host[host]
            layout.drawn.append(DrawnHost(name, len(ranks), ranks[:left]))
            left -= len(ranks)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    layout.spans = {
        axis: _span(places, number) for number, axis in enumerate(PLACE_AXES, 1) if sizes[axis] > 1
    }
    return layout


def _span(places: list[tuple[int, ...]], axis: int) -> int:
    hosts: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for place in places:
        hosts[place[1:axis] + place[axis + 1 :]].add(place[0])
    return max((len(found) for found in hosts.values()), default=0)
