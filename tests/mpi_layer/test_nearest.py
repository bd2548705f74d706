"""GPUs are dealt out to ranks so that the distances are least on the whole."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.mpi.nearest import nearest

DISTANCES = st.sampled_from([10, 12, 32])


@st.composite
def tables(draw, ranks=6, gpus=6):
    """The distances of some ranks to some GPUs."""
    ranks, gpus = draw(st.integers(1, ranks)), draw(st.integers(1, gpus))
    row = st.lists(DISTANCES, min_size=gpus, max_size=gpus)
    return draw(st.lists(row, min_size=ranks, max_size=ranks))


@given(tables())
def test_no_other_way_is_nearer_and_none_as_near_is_closer_to_the_order(table):
    gpus, seats = len(table[0]), max(len(table), len(table[0]))

    def price(taken):
        distance = sum(row[seat % gpus] for row, seat in zip(table, taken, strict=True))
        return distance, sum((rank - seat) ** 2 for rank, seat in enumerate(taken))

    best = min(price(taken) for taken in itertools.permutations(range(seats), len(table)))
    found = nearest(table)
    assert sum(row[gpu] for row, gpu in zip(table, found, strict=True)) == best[0]
    if len(table) <= gpus:
        assert price(found) == best


@given(tables(ranks=20, gpus=9))
def test_a_gpu_is_shared_only_if_all_gpus_are_in_use(table):
    ranks, gpus = len(table), len(table[0])
    used = Counter(nearest(table))
    assert len(used) == min(ranks, gpus)
    assert max(used.values()) == -(-ranks // gpus)


def test_ranks_that_are_equally_near_to_all_take_them_in_order():
    assert nearest([[10] * 4] * 4) == [0, 1, 2, 3]
    assert nearest([[10] * 4] * 8) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert nearest([[10] * 4] * 2) == [0, 1]
