"""The rows that early stopping is decided by."""

from __future__ import annotations

import numpy as np

from hpc_train.tabular.held_out import choose_held_out


def test_each_class_has_its_share_and_none_is_lost():
    classes = np.repeat([0, 1, 2], [70, 29, 1])
    chosen = choose_held_out(100, 0.1, 0, classes)
    assert np.bincount(classes[chosen], minlength=3).tolist() == [7, 3, 0]


def test_the_seed_alone_chooses():
    chosen = [choose_held_out(500, 0.2, seed) for seed in (1, np.int32(1), 2)]
    assert [one.sum() for one in chosen] == [100] * 3
    assert (chosen[0] == chosen[1]).all()
    assert (chosen[0] != chosen[2]).any()


def test_of_few_rows_none_is_held_out():
    assert not choose_held_out(19, 0.5, 0).any()
