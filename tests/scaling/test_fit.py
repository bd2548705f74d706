"""The model finds times that follow it, and its intervals hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.scaling.fit import (
    STRONG,
    WEAK,
    StepTimeModel,
    TimePoint,
    gustafson_share,
    largest_worthwhile,
    least_squares,
    left_out,
    predictions,
)


def points(basis, nodes, noise=0.0, seed=0, **coefficients):
    """Times of a model with these coefficients, disturbed by a share of themselves."""
    model = StepTimeModel(basis, dict.fromkeys(basis, 0.0) | coefficients)
    drawn = np.random.default_rng(seed).normal(0, noise, len(nodes))
    times = [model.seconds(n) * (1 + d) for n, d in zip(nodes, drawn.tolist(), strict=True)]
    found = [TimePoint(n, t, noise * t, 3) for n, t in zip(nodes, times, strict=True)]
    return model, found


@pytest.mark.parametrize(
    ("basis", "coefficients"),
    [
        (STRONG, {"compute": 1.0, "inside": 0.1}),
        (STRONG, {"compute": 1.0, "ring": 0.3}),  # compute less than it seems at first
        (STRONG, {"compute": 1.0, "inside": 0.05, "message": 0.05}),
        (WEAK, {"compute": 1.0, "ring": 0.2}),
        (WEAK, {"compute": 1.0, "message": 0.05}),
    ],
)
def test_times_that_follow_the_model_are_predicted(basis, coefficients):
    true, found = points(basis, [1, 2, 4], **coefficients)
    for one in predictions(found, basis, [8, 16]):
        assert one.seconds == pytest.approx(true.seconds(one.nodes), rel=0.06)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=5), st.sampled_from([STRONG, WEAK]))
def test_no_coefficient_is_below_zero(times, basis):
    found = [TimePoint(2**i, t, 0.01 * t) for i, t in enumerate(times)]
    model = StepTimeModel.of(found, basis)
    assert min(model.coefficients.values()) >= 0
    assert max(model.coefficients.values()) > 0


def test_a_point_with_a_large_error_counts_little():
    rows = [[1.0], [1.0], [1.0]]
    (found,) = least_squares(rows, [1.0, 1.0, 5.0], [0.01, 0.01, 10.0])
    assert found == pytest.approx(1.0, abs=1e-4)


def test_a_coefficient_that_explains_only_scatter_is_left_out():
    shares, left_in = [], 0
    for seed in range(20):
        _, found = points(STRONG, [1, 2, 4, 8], noise=0.02, seed=seed, compute=1.0, inside=0.2)
        model = StepTimeModel.of(found, STRONG)
        shares.append(model.serial_share)
        left_in += model.coefficients["message"] > 0
    assert left_in <= 5
    assert np.median(shares) == pytest.approx(0.2 / 1.2, abs=0.02)


def test_intervals_have_the_truth_mostly():
    held = 0
    for seed in range(10):
        true, found = points(
            STRONG, [1, 2, 4, 8], noise=0.03, seed=seed, compute=1.0, inside=0.05, message=0.01
        )
        (one,) = predictions(found, STRONG, [16])
        assert one.low < one.seconds < one.high
        held += one.low <= true.seconds(16) <= one.high
    assert held >= 8


def test_the_error_of_the_largest_number_of_nodes_widens_the_interval():
    _, found = points(STRONG, [1, 2, 4], compute=1.0)
    found[-1] = TimePoint(4, 0.5, 0.001)  # it no longer gains anything
    missed = left_out(found, STRONG)
    assert missed == pytest.approx(0.25 / 0.5 - 1, rel=0.05)
    (one,) = predictions(found, STRONG, [8])
    assert one.high >= one.seconds * (1 - missed) * 0.999


def test_shares_of_amdahl_and_gustafson():
    model = StepTimeModel(STRONG, {"compute": 0.9, "inside": 0.1, "ring": 0.0, "message": 0.0})
    assert model.serial_share == pytest.approx(0.1)
    assert gustafson_share(10, 9.1) == pytest.approx(0.1)


def test_efficiency_of_half_is_where_serial_work_equals_the_share_of_each_node():
    model = StepTimeModel(STRONG, {"compute": 0.9, "inside": 0.1, "ring": 0.0, "message": 0.0})
    # 1 / (n t(n)) = 1 / (0.9 + 0.1 n) >= 1 / 2
    assert (
        largest_worthwhile(model, {1: model.seconds(1)}, 100, 0.5, weak=False, can_run=bool) == 11
    )
    assert largest_worthwhile(model, {1: model.seconds(1)}, 8, 0.5, weak=False, can_run=bool) == 8
    grown = StepTimeModel(WEAK, {"compute": 1.0, "ring": 0.0, "message": 0.1})
    # messages of 11 to 16 nodes take 2 x 4 of them
    assert (
        largest_worthwhile(grown, {1: grown.seconds(1)}, 100, 1 / 1.81, weak=True, can_run=bool)
        == 16
    )
    # what was measured counts more than the model
    worse = {1: model.seconds(1), 2: 0.9 * model.seconds(1), 4: 0.9 * model.seconds(1)}
    assert largest_worthwhile(model, worse, 8, 0.6, weak=False, can_run=bool) == 1
    # of the numbers that the training may have, the largest is looked at first
    asked: list[int] = []
    largest_worthwhile(
        model, {1: 1.0}, 10**5, 0.5, weak=False, can_run=lambda n: bool(asked.append(n)) or n < 11
    )
    assert asked == [11, 10]
    # 11 nodes cannot be given equal parts of 64 samples
    divides = lambda nodes: 64 % nodes == 0  # noqa: E731
    assert largest_worthwhile(model, {1: 1.0}, 100, 0.5, weak=False, can_run=divides) == 8
