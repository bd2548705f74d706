"""Balanced sampling: each class equally often, whatever the ranks, and from any step on."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.data.loader import cut
from hpc_train.data.order import SampleOrder
from hpc_train.data.tables import balanced
from hpc_train.data.tables.balanced import BalancedClasses, ClassIndex
from hpc_train.errors import ConfigError


class Rows:
    """A data set whose batches are the numbers of their rows."""

    def __init__(self, rows, samples_per_block=1):
        self.rows, self.samples_per_block = rows, samples_per_block

    def __len__(self):
        return self.rows

    def fetch(self, indices):
        return np.asarray(indices)


def unequal(rows, classes, seed):
    """Classes, of which the last ones are rare, but each of which has a row."""
    generator = np.random.default_rng(seed)
    drawn = np.minimum(generator.geometric(0.6, rows) - 1, classes - 1)
    drawn[generator.permutation(rows)[:classes]] = np.arange(classes)
    return drawn


@given(st.integers(1, 1200), st.integers(1, 40), st.integers(0, 99))
def test_the_index_finds_the_rows_of_each_class(rows, classes, seed):
    numbers = np.random.default_rng(seed).integers(0, classes, rows)
    index = ClassIndex(numbers, classes)
    for number in range(classes):
        expected = np.flatnonzero(numbers == number)
        assert index.count(number) == len(expected)
        backwards = np.arange(len(expected))[::-1]
        assert (index.rows(number, backwards) == expected[::-1]).all()


def test_the_index_counts_large_tables_in_portions(monkeypatch):
    monkeypatch.setattr(balanced, "ROWS_COUNTED_AT_ONCE", 1000)
    numbers = np.random.default_rng(1).integers(0, 300, 20_000)
    index = ClassIndex(numbers, 300)
    expected = np.flatnonzero(numbers == 299)
    assert (index.rows(299, np.arange(len(expected))) == expected).all()
    assert index.numbers.dtype == np.uint16


few = settings(max_examples=15)  # an order takes a tenth of a second to make
layouts = st.sampled_from([(1, 24), (2, 3), (3, 8), (4, 2), (6, 4)])  # ranks, micro-batch
cases = {
    "rows": st.integers(60, 700),
    "classes": st.integers(2, 7),
    "seed": st.integers(0, 2**40),
    "block": st.sampled_from([1, 10, 64]),
    "shuffle": st.sampled_from([True, False, "full"]),
}


@few
@given(**cases, layout=layouts, step=st.integers(1, 10**9))
def test_any_rank_draws_its_part_of_the_same_order_at_any_step(
    rows, classes, seed, block, shuffle, layout, step
):
    numbers = unequal(rows, classes, seed % 100)

    def order():
        data = BalancedClasses(Rows(rows, block), numbers, classes)
        return data, SampleOrder.of(data, 24, seed=seed, shuffle=shuffle)

    data, whole = order()
    whole.indices(max(1, step - 1), 0, 24)  # one that comes from an earlier step
    expected = data.fetch(whole.indices(step, 0, 24))
    ranks, size = layout
    parts = []
    for rank in range(ranks):
        own, fresh = order()
        mine = cut(24, ranks, rank, size)
        parts += [own.fetch(fresh.indices(step, part.first, part.count)) for part in mine]
    assert (np.concatenate(parts) == expected).all()


@few
@given(**cases, first=st.integers(1, 10**6))
def test_each_class_comes_equally_often_in_any_run_of_steps(
    rows, classes, seed, block, shuffle, first
):
    numbers = unequal(rows, classes, seed % 100)
    data = BalancedClasses(Rows(rows, block), numbers, classes)
    order = SampleOrder.of(data, 24, seed=seed, shuffle=shuffle)
    drawn = np.concatenate(
        [data.fetch(order.indices(step, 0, 24)) for step in range(first, first + 10)]
    )
    counts = np.bincount(numbers[drawn], minlength=classes)
    assert np.abs(counts - 240 / classes).max() <= 2


@few
@given(**cases)
def test_all_rows_of_a_class_come_before_one_comes_again(rows, classes, seed, block, shuffle):
    numbers = unequal(rows, classes, seed % 100)
    data = BalancedClasses(Rows(rows, block), numbers, classes)
    order = SampleOrder.of(data, 20, seed=seed, shuffle=shuffle)
    steps = 3 * classes * rows // 20
    drawn = np.concatenate([data.fetch(order.indices(n, 0, 20)) for n in range(1, steps + 1)])
    for number in range(classes):
        own, count = drawn[numbers[drawn] == number], (numbers == number).sum()
        # Blocks leave out no row of an epoch, but a step's rows are sorted, so look at all of them.
        times = np.bincount(own, minlength=rows)[numbers == number]
        assert times.max() - times.min() <= 1
        assert times.sum() >= count


def test_workers_can_take_the_data_set():
    data = BalancedClasses(Rows(50), unequal(50, 3, 0), 3)
    copy = pickle.loads(pickle.dumps(data))
    assert (copy.fetch([0, 49]) == data.fetch([0, 49])).all()


def test_one_class_is_refused():
    with pytest.raises(ConfigError, match="the training rows are of one class"):
        BalancedClasses(Rows(5), np.zeros(5, int), 2)
