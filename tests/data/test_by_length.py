"""Micro-batches by length: every sample once, as many for each rank, and little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.by_length import PartsByLength, cut_by_length
from hpc_train.data.lengths import lengths_of
from hpc_train.data.loader import Loader
from hpc_train.data.order import SampleOrder
from hpc_train.errors import UserError


@given(st.lists(st.integers(0, 90), min_size=1, max_size=60), st.integers(1, 7), st.integers(1, 99))
def test_every_sample_counts_once_and_all_ranks_have_as_many(lengths, ranks, most):
    lengths = np.array(lengths)
    dealt = cut_by_length(lengths, ranks, most)
    assert len({len(parts) for parts in dealt}) == 1
    every = [part for parts in dealt for part in parts]
    places = [place for part in every if part.counted for place in part.places]
    assert sorted(places) == list(range(len(lengths)))
    for part in every:
        assert part.longest == max(lengths[[*part.places]])
        assert part.count * part.longest <= most or part.count == 1
        assert part.counted or len(lengths) < len(every)


def test_there_is_less_padding_and_the_ranks_have_about_as_much():
    lengths = np.random.default_rng(0).lognormal(4, 1, 512).astype(int) + 1
    dealt = cut_by_length(lengths, 4, 4096)
    loads = [sum(part.count * part.longest for part in parts) for parts in dealt]
    in_order = lengths.reshape(-1, 8).max(1).sum() * 8
    assert sum(loads) < 1.2 * lengths.sum() < 0.5 * in_order
    assert max(loads) < 1.2 * min(loads)


class Sized:
    """Samples that are their own numbers, with lengths that repeat after 50."""

    def __len__(self):
        return 200

    def lengths(self, indices):
        return np.asarray(indices) % 50

    def fetch(self, indices):
        return np.asarray(indices)


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 0), (2, 0), (2, 2)])
def test_a_loader_delivers_the_steps_of_its_order(prefetch, workers):
    order, found = SampleOrder(200, 20, seed=1), []
    for rank in range(3):
        parts = PartsByLength(Sized(), order, 100, ranks=3, rank=rank)
        loader = Loader(
            Sized(), order, parts, first_step=2, last_step=9, prefetch=prefetch, workers=workers
        )
        found.append([*loader])
        loader.close()
    for steps in zip(*found, strict=True):
        micro_batches = [one for step in steps for one in step.micro_batches]
        for one in micro_batches:
            assert one.items == one.part.count * one.part.counted
            assert max(one.data % 50) == one.part.longest
        indices = np.concatenate([one.data for one in micro_batches if one.items])
        wanted = order.indices(steps[0].number, 0, 20)
        assert sorted(indices) == sorted(wanted)
    assert len({len(step.micro_batches) for step in found[0]}) > 1


@pytest.mark.parametrize("given", [[1.5, 2.0], [3], [[1], [2]], [4, -1], [None, None]])
def test_lengths_that_are_not_whole_numbers_are_refused(given):
    class Wrong:
        def lengths(self, indices):
            return given

    with pytest.raises(UserError, match="one whole number for each sample"):
        lengths_of(Wrong(), [7, 8])
