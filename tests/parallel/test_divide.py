from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.parallel.divide import divide

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def largest(costs, runs):
    return max(sum(costs[run.start : run.stop]) for run in runs)


def all_divisions(items, parts):
    for cuts in combinations(range(1, items), parts - 1):
        yield [range(a, b) for a, b in pairwise((0, *cuts, items))]


@given(COSTS, st.integers(1, 9))
def test_no_division_has_a_smaller_largest_run(costs, parts):
    if parts > len(costs):
        return
    runs = divide(costs, parts)
    assert runs in list(all_divisions(len(costs), parts))
    best = min(largest(costs, other) for other in all_divisions(len(costs), parts))
    assert largest(costs, runs) == best


@given(st.lists(st.floats(0, 1e300), min_size=4, max_size=4))
def test_costs_of_any_magnitude(costs):
    runs = divide(costs, 2)
    best = min(largest(costs, other) for other in all_divisions(4, 2))
    assert largest(costs, runs) == pytest.approx(best)


def test_equal_layers_are_dealt_evenly():
    assert [len(run) for run in divide([1.0] * 12, 4)] == [3, 3, 3, 3]
    assert [len(run) for run in divide([1.0] * 10, 4)] == [2, 3, 2, 3]


def test_a_large_head_does_not_unbalance_the_other_stages():
    assert [len(run) for run in divide([0, *[1] * 8, 4], 5)] == [3, 2, 2, 2, 1]
    assert [len(run) for run in divide([0, *[1] * 7, 2.5], 4)] == [3, 2, 3, 1]


def test_a_thousand_layers():
    costs = [1 + i * 7919 % 97 for i in range(1000)]
    runs = divide(costs, 128)
    assert [item for run in runs for item in run] == list(range(1000))
    assert len(runs) == 128
    assert sum(costs) / 128 <= largest(costs, runs) < sum(costs) / 128 + max(costs)


@pytest.mark.parametrize(
    ("costs", "parts"), [([1, 2], 3), ([], 1), ([1], 0), ([1, -1], 1), ([1, float("nan")], 1)]
)
def test_what_cannot_be_divided_is_refused(costs, parts):
    with pytest.raises(ValueError, match="divided|negative"):
        divide(costs, parts)
