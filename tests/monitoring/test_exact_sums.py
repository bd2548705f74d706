"""Exact sums: rounded once, whatever the order of the numbers and whichever rank adds them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.monitoring.exact_sums import ExactSums
from hpc_train.mpi.group import Group

PLACES = 3
numbers = st.lists(
    st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, PLACES - 1)),
    max_size=40,
)


def arrays(pairs):
    return np.array([one for one, _ in pairs], np.float64), np.array([at for _, at in pairs], int)


@given(numbers, st.integers(0, 40))
def test_a_sum_is_rounded_once(pairs, cut):
    sums = ExactSums(PLACES)
    sums.add(arrays(pairs[:cut]), arrays(pairs[cut:]))
    sums.add(arrays(pairs))
    for place, found in enumerate(sums.over(Group())):
        exact = 2 * sum(Fraction(one) for one, at in pairs if at == place)
        try:
            expected = float(exact)
        except OverflowError:
            expected = math.inf if exact > 0 else -math.inf
        assert found == expected


def test_a_number_that_is_not_finite_leaves_its_sum_undefined():
    sums = ExactSums(3)
    sums.add((np.array([1.0, math.nan, 2.0]), np.array([0, 1, 0])), (np.array([math.inf]), 2))
    found = sums.over(Group())
    assert found[0] == 3
    assert math.isnan(found[1])
    assert math.isnan(found[2])


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_ranks_have_the_same_sums(group):
    generator = np.random.default_rng(0)
    values = generator.normal(size=1000) * 10.0 ** generator.integers(-300, 300, 1000)
    places = np.arange(1000) % PLACES
    sums, alone = ExactSums(PLACES), ExactSums(PLACES)
    mine = slice(group.rank, None, group.size)
    sums.add((values[mine], places[mine]))
    alone.add((values[::-1], places[::-1]))
    assert sums.over(group) == alone.over(Group())
