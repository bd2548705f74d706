from __future__ import annotations

import itertools
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.data.mixture import Mixture
from hpc_train.data.order import Permutation, SampleOrder, evenly
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


@given(samples=st.integers(1, 500), most=st.integers(0, 600))
def test_some_samples_are_spread_evenly(samples, most):
    some = evenly(samples, most)
    assert len(some) == (min(samples, most) if most else samples)
    assert some[0] == 0
    gaps = [b - a for a, b in pairwise([*some, samples])]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("block", [0, None, 2.5])
def test_a_data_set_whose_blocks_are_no_number_is_refused(block):
    class Blocks(list):
        samples_per_block = block

    with pytest.raises(ConfigError, match="samples_per_block"):
        SampleOrder.of(Blocks(range(9)), 3)
    assert SampleOrder.of(Blocks(range(9)), 3, shuffle="full").block == 1


@pytest.mark.parametrize("shuffle", ["none", "false", "FULL", None, 2])
def test_a_shuffle_that_is_none_of_three_values_is_refused(shuffle):
    for dataset in ([1, 2], Mixture([([1, 2], 1), ([3, 4], 1)])):
        with pytest.raises(ConfigError, match='give True, False or "full"'):
            SampleOrder.of(dataset, 2, shuffle=shuffle)


def test_whole_numbers_of_numpy_are_taken_as_pythons():
    class Blocks(list):
        samples_per_block = np.int64(3)

    order = SampleOrder.of(Blocks(range(9)), 3, seed=np.int64(5))
    mixed = SampleOrder.of(Mixture([(Blocks(range(9)), 1)]), 3, seed=np.uint8(5))
    assert {type(one) for one in (order.seed, order.block, mixed.seed)} == {int}
    assert json.dumps(order.identity)
    assert (order.indices(2, 0, 3) == SampleOrder(9, 3, seed=5, block=3).indices(2, 0, 3)).all()


@pytest.mark.parametrize("seed", [None, 1.5, "7"])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(ConfigError, match=r"the seed is .*: give a whole number"):
        SampleOrder.of([*range(9)], 3, seed=seed)


@pytest.mark.parametrize("together", [0, -1, "z"])
def test_a_data_set_whose_windows_are_no_number_is_refused(together):
    class Blocks(list):
        samples_per_block, samples_together = 3, together

    with pytest.raises(ConfigError, match="samples_together"):
        SampleOrder.of(Blocks(range(9)), 3)


def test_a_data_set_may_say_how_many_samples_are_shuffled_together():
    class Blocks(list):
        samples_per_block, samples_together = 10, 40

    order = SampleOrder.of(Blocks(range(400)), 40)
    assert order.identity == {"samples per block": 10, "samples shuffled together": 40}
    for step in range(1, 11):  # four blocks each
        assert len({*(order.indices(step, 0, 40) // 10).tolist()}) == 4
    assert SampleOrder.of(Blocks(range(400)), 40, shuffle="full").identity == {}


def test_too_little_data_for_a_batch_is_an_error():
    with pytest.raises(ConfigError, match=r"a batch has 11 samples, and the data set has 10"):
        SampleOrder(10, 11)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr("hpc_train.data.order.SHUFFLED_TOGETHER", 64)


@given(samples=st.integers(1, 500), block=st.integers(2, 70), seed=SEEDS, epoch=st.integers(0, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_epoch_in_windows_visits_every_sample_once(small_windows, samples, block, seed, epoch):
    order = SampleOrder(samples, 1, seed=seed, block=block)
    steps = range(epoch * samples + 1, (epoch + 1) * samples + 1)
    assert sorted(int(order.indices(step, 0, 1)[0]) for step in steps) == list(range(samples))


@given(st.integers(1, 300), st.lists(st.integers(0, 24), max_size=4), st.integers(2, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_batch_in_windows_does_not_depend_on_how_it_is_cut(small_windows, step, cuts, block):
    order = SampleOrder(333, 24, seed=1, block=block)
    borders = sorted({0, 24, *cuts})
    pieces = [order.indices(step, a, b - a) for a, b in itertools.pairwise(borders)]
    whole = SampleOrder(333, 24, seed=1, block=block).indices(step, 0, 24)
    assert (np.concatenate(pieces) == whole).all()
    assert (np.sort(whole) == whole).all()


def test_each_epoch_leaves_other_samples_over(small_windows):
    order = SampleOrder(103, 10, seed=0, block=8)
    left = []
    for epoch in range(40):
        steps = range(epoch * 10 + 1, epoch * 10 + 11)
        seen = np.concatenate([order.indices(step, 0, 10) for step in steps])
        left += sorted(set(range(103)) - set(seen))
    assert len(set(left)) > 50  # of 120, from 103 samples


def test_a_rank_needs_few_blocks_and_every_step_many():
    """A rank of 16 reads little more than its share of the blocks in a window, not all of them."""
    ranks, batch, block, samples = 16, 512, 128, 1 << 20
    order = SampleOrder(samples, batch, seed=5, block=block)
    share = batch // ranks
    needed = [set() for _ in range(ranks)]
    for step in range(1, 801):
        whole = order.indices(step, 0, batch) // block
        assert len(set(whole)) > 0.9 * batch  # a full shuffle gives 0.97
        for rank in range(ranks):
            needed[rank] |= set(whole[rank * share : (rank + 1) * share])
    assert max(map(len, needed)) < 3 * samples / block / ranks  # 16 times that without sorting


def test_samples_of_a_block_are_scattered_as_by_a_full_shuffle():
    """Of sorted data, 64 kinds of equal length, steps have as mixed samples as at random."""
    samples, batch = 1 << 20, 256
    spread = {}
    for block in (1, 128):
        order = SampleOrder(samples, batch, seed=3, block=block)
        kinds = [order.indices(step, 0, batch) * 64 // samples for step in range(1, 400)]
        counts = np.stack([np.bincount(some, minlength=64) for some in kinds])
        spread[block] = counts.std()
    assert spread[128] == pytest.approx(spread[1], rel=0.03)
