"""The rows that early stopping is decided by."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_train.tabular.held_out import choose_held_out


def test_each_class_has_its_share_and_none_is_lost():
    classes = np.repeat([0, 1, 2], [70, 29, 1])
    chosen = choose_held_out(100, 0.1, 0, classes)
    assert np.bincount(classes[chosen], minlength=3).tolist() == [7, 3, 0]


@pytest.mark.parametrize(
    ("sizes", "fraction", "wanted"),
    [
        ([4] * 100, 0.1, [1] * 40 + [0] * 60),
        ([1] * 10 + [2] * 10, 0.5, [0] * 10 + [1] * 10),
        ([1] * 30, 0.5, [0] * 30),
    ],
)
def test_shares_of_small_classes_add_up(sizes, fraction, wanted):
    classes = np.repeat(np.arange(len(sizes)), sizes)
    chosen = choose_held_out(len(classes), fraction, 0, classes)
    assert np.bincount(classes[chosen], minlength=len(sizes)).tolist() == wanted


def test_the_seed_alone_chooses():
    chosen = [choose_held_out(500, 0.2, seed) for seed in (1, np.int32(1), 2)]
    assert [one.sum() for one in chosen] == [100] * 3
    assert (chosen[0] == chosen[1]).all()
    assert (chosen[0] != chosen[2]).any()


def test_of_few_rows_none_is_held_out():
    assert not choose_held_out(19, 0.5, 0).any()
