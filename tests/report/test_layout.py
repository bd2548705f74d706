"""The layout as the page draws it."""

from __future__ import annotations

import math

import pytest

from hpc_train.report.layout import layout_of
from tests.report.runs import start


def test_ranks_lie_on_their_hosts_and_groups_span_them():
    layout = layout_of(start(0, 0))
    assert (layout.ranks, layout.hosts) == (4, 2)
    drawn = {host.name: [(one.rank, one.dp, one.pp) for one in host.ranks] for host in layout.drawn}
    assert drawn == {"first": [(0, 0, 0), (1, 1, 0)], "second": [(2, 0, 1), (3, 1, 1)]}
    assert layout.spans == {"dp": 1, "pp": 2}


def test_a_large_job_is_drawn_in_part():
    places = [[rank // 8, rank // 8, rank % 8, 0] for rank in range(8000)]
    sizes = {"dp": 1000, "tp": 8, "pp": 1}
    hosts = [f"n{number}" for number in range(1000)]
    layout = layout_of({"hosts": hosts, "layout": sizes, "ranks": places})
    assert (layout.ranks, layout.hosts, len(layout.drawn)) == (8000, 1000, 32)
    assert layout.spans == {"dp": 1000, "tp": 1}
    many = layout_of(
        {"hosts": ["one"], "layout": sizes, "ranks": [[0, *place[1:]] for place in places]}
    )
    assert (many.drawn[0].count, len(many.drawn[0].ranks)) == (8000, 256)


@pytest.mark.parametrize(
    "told",
    [
        {"layout": {"dp": "x", "tp": 1, "pp": 1}},
        {"layout": []},
        {"hosts": 3},
        {"ranks": [[0, 0]]},
        {"ranks": [None]},
        {"ranks": [[0, 0, 0, math.inf]]},
        {"ranks": [[0, 0, 0, "a"]]},
    ],
)
def test_what_is_no_layout_is_not_drawn(told):
    assert layout_of(start(0, 0) | told) is None
    assert layout_of({}) is None
