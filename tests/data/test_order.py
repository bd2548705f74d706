from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.order import Permutation, SampleOrder
from hpc_train.errors import ConfigError

SEEDS = st.integers(0, 2**40)


@given(st.integers(1, 3000), SEEDS, st.integers(0, 50))
def test_an_epoch_visits_every_sample_once(size, seed, epoch):
    visited = Permutation(size, seed, epoch)(np.arange(size))
    assert sorted(visited) == list(range(size))


def test_epochs_and_seeds_differ():
    positions = np.arange(1000)
    orders = [tuple(Permutation(1000, s, e)(positions)) for s, e in [(0, 0), (0, 1), (1, 0)]]
    assert len(set(orders)) == 3


def test_neighbours_are_scattered_as_in_a_random_order():
    size = 100_000
    visited = Permutation(size, 1, 0)(np.arange(size))
    jumps = np.abs(np.diff(visited))
    assert jumps.mean() == pytest.approx(size / 3, rel=0.02)  # the mean of two uniform numbers
    first_tenth = visited[: size // 10]
    counts = np.histogram(first_tenth, bins=10, range=(0, size))[0]
    assert counts == pytest.approx([1000] * 10, rel=0.15)


def test_any_place_of_a_huge_data_set_is_found_at_once():
    permutation = Permutation(10**15, 3, 2)
    found = permutation(np.array([0, 10**15 - 1]))
    assert (found < 10**15).all()
    assert (found == permutation(np.array([0, 10**15 - 1]))).all()


@given(
    st.integers(1, 500),
    st.integers(1, 50),
    st.integers(1, 400),
    st.booleans(),
    st.lists(st.integers(0, 50), max_size=4),
)
def test_the_order_does_not_depend_on_how_a_batch_is_cut(samples, batch, step, shuffle, cuts):
    if samples < batch:
        return
    order = SampleOrder(samples, batch, seed=1, shuffle=shuffle)
    borders = sorted({0, batch, *(cut for cut in cuts if cut < batch)})
    pieces = [order.indices(step, a, b - a) for a, b in itertools.pairwise(borders)]
    assert (np.concatenate(pieces) == order.indices(step, 0, batch)).all()


@given(samples=st.integers(7, 5000), steps=st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_the_order_does_not_depend_on_the_steps_asked_for_before(samples, steps):
    order = SampleOrder(samples, 7, seed=1)
    for step in [later for one in steps for later in (one, one + 1)]:
        alone = SampleOrder(samples, 7, seed=1)
        assert (order.indices(step, 2, 3) == alone.indices(step, 2, 3)).all()


def test_an_epochs_batches_do_not_overlap_and_leave_less_than_one_over():
    order = SampleOrder(103, 10, seed=0)
    seen = np.concatenate([order.indices(step, 0, 10) for step in range(1, 11)])
    assert len(set(seen)) == 100
    assert [order.epoch(step) for step in (1, 10, 11, 20, 21)] == [0, 0, 1, 1, 2]
    second = np.concatenate([order.indices(step, 0, 10) for step in range(11, 21)])
    assert set(second) != set(seen)


def test_too_little_data_for_a_batch_is_an_error():
    with pytest.raises(ConfigError, match=r"a batch has 11 samples, and the data set has 10"):
        SampleOrder(10, 11)
