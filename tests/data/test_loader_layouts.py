"""The loader on any layout: the same steps, each sample once, and the same again after any stop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.data import loader
from hpc_train.data import order as orders
from hpc_train.data.loader import Loader, cut
from hpc_train.data.order import SampleOrder

SMALL_WINDOW = 64


class Numbers:
    """Sample i is the number i. Neighbours are stored together in blocks."""

    def __init__(self, size, samples_per_block):
        self.size, self.samples_per_block = size, samples_per_block

    def __len__(self):
        return self.size

    def fetch(self, indices):
        return torch.tensor(np.asarray(indices))


class Case(NamedTuple):
    """A data set, a batch and a shuffle, and a layout of them."""

    dataset: Numbers
    batch: int
    shuffle: object
    seed: int
    dp: int
    micro_batch: int
    prefetch: int
    workers: int

    @property
    def order(self):
        return SampleOrder.of(self.dataset, self.batch, seed=self.seed, shuffle=self.shuffle)

    def steps(self, rank, first, last, *, plain=False):
        """The numbers of each step's samples on a rank; plain: read by one thread, step by step."""
        ahead = {"prefetch": 0} if plain else {"prefetch": self.prefetch, "workers": self.workers}
        parts = cut(self.batch, self.dp, rank, self.micro_batch)
        made = Loader(self.dataset, self.order, parts, first_step=first, last_step=last, **ahead)
        try:
            found = {
                step.number: torch.cat([micro.data for micro in step.micro_batches]).tolist()
                for step in made
            }
        finally:
            made.close()
        assert [*found] == [*range(first, last + 1)]
        return [*found.values()]


@st.composite
def cases(draw, most_steps=12):
    """Any layout of a few steps, with samples left over in most cases."""
    dp, micro_batch = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    batch = dp * micro_batch * draw(st.integers(1, 3))
    samples = batch * draw(st.integers(1, most_steps)) + draw(st.integers(0, batch - 1))
    return Case(
        dataset=Numbers(samples, draw(st.sampled_from([1, 3, 8, 50, 1000]))),
        batch=batch,
        shuffle=draw(st.sampled_from([True, "full", False])),
        seed=draw(st.integers(0, 2**40)),
        dp=dp,
        micro_batch=micro_batch,
        prefetch=draw(st.integers(0, 3)),
        workers=draw(st.integers(0, 3)),
    )


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Small windows of the shuffle, and threads in place of worker processes."""
    monkeypatch.setattr(orders, "SHUFFLED_TOGETHER", SMALL_WINDOW)
    monkeypatch.setattr(loader, "why_no_processes", lambda: "threads are wanted")


LAYOUTS = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@LAYOUTS
@given(case=cases(), epochs=st.integers(1, 3))
def test_each_step_is_the_same_on_every_layout_and_an_epoch_has_each_sample_once(case, epochs):
    last = epochs * case.order.steps_per_epoch
    shares = [case.steps(rank, 1, last) for rank in range(case.dp)]
    found = [[number for share in some for number in share] for some in zip(*shares, strict=True)]
    alone = case._replace(dp=1, micro_batch=case.batch)
    assert found == alone.steps(0, 1, last, plain=True)
    per_epoch = case.order.steps_per_epoch
    for epoch in range(epochs):
        steps = found[epoch * per_epoch : (epoch + 1) * per_epoch]
        numbers = [number for step in steps for number in step]
        assert len({*numbers}) == len(numbers) == per_epoch * case.batch
        assert {*numbers} <= {*range(case.dataset.size)}


@LAYOUTS
@given(case=cases(most_steps=7), data=st.data())
def test_a_loader_that_is_stopped_at_any_batch_goes_on_with_the_same(case, data):
    rank, per_epoch = data.draw(st.integers(0, case.dp - 1)), case.order.steps_per_epoch
    last = per_epoch + 2  # the epoch after it, too
    whole = case.steps(rank, 1, last, plain=True)
    for stop in range(1, last + 1):
        assert case.steps(rank, 1, stop) == whole[:stop]
        if stop < last:
            assert case.steps(rank, stop + 1, last) == whole[stop:]


RANKS = 10_000


@pytest.mark.parametrize(
    ("shuffle", "micro_batch"), [(True, 1), (True, 3), ("full", 3), (False, 3)]
)
def test_ten_thousand_ranks_take_each_sample_of_a_step_once(monkeypatch, shuffle, micro_batch):
    """The steps are at the end of an epoch of a billion samples."""
    monkeypatch.undo()  # windows of their real size
    batch, samples = 3 * RANKS, 10**9 + 7
    permuted = []
    real = orders.Permutation.__call__

    def counted(permutation, positions):
        permuted.append(positions.size)
        return real(permutation, positions)

    monkeypatch.setattr(orders.Permutation, "__call__", counted)
    dataset = Numbers(samples, 128)
    order = SampleOrder.of(dataset, batch, seed=11, shuffle=shuffle)
    for step in (order.steps_per_epoch - 5, order.steps_per_epoch):
        shares = []
        for rank in range(RANKS):
            parts = cut(batch, RANKS, rank, micro_batch)
            assert sum(part.count for part in parts) == 3
            shares += [order.indices(step, part.first, part.count) for part in parts]
        whole = np.concatenate(shares)
        assert len(np.unique(whole)) == batch
        assert (whole >= 0).all()
        assert (whole < samples).all()
        one = SampleOrder.of(dataset, batch, seed=11, shuffle=shuffle)
        assert (whole == one.indices(step, 0, batch)).all()
        # What a rank computes does not grow with the number of steps before, or of samples.
        permuted.clear()
        alone = SampleOrder.of(dataset, batch, seed=11, shuffle=shuffle)
        for part in cut(batch, RANKS, RANKS - 1, micro_batch):
            alone.indices(step, part.first, part.count)
        assert sum(permuted) <= {True: 2 * batch, "full": 3 * 512, False: 0}[shuffle]
