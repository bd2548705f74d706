from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config import OptimizerSection
from hpc_train.training.learning_rate import learning_rate, scaling

SCHEDULES = st.sampled_from(["constant", "linear", "cosine"])


@given(SCHEDULES, st.integers(0, 50), st.integers(51, 200))
def test_rates_rise_to_the_peak_and_never_above(schedule, warmup, last):
    section = OptimizerSection(lr=2.0, warmup_steps=warmup, schedule=schedule)
    rates = [learning_rate(section, step, last, ranks=1) for step in range(1, last + 1)]
    assert all(0 <= rate <= 2 + 1e-12 for rate in rates)
    assert rates[:warmup] == [pytest.approx(2 * (i + 1) / warmup) for i in range(warmup)]
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)
    assert after[-1] == pytest.approx(2 if schedule == "constant" else 0)


def test_halfway_down_the_rate_is_half():
    for schedule in ("linear", "cosine"):
        section = OptimizerSection(lr=1.0, warmup_steps=10, schedule=schedule)
        assert learning_rate(section, 60, 110, ranks=1) == pytest.approx(0.5)


@pytest.mark.parametrize(("kind", "factor"), [("none", 1), ("linear", 8), ("sqrt", math.sqrt(8))])
def test_scaling_with_the_number_of_ranks(kind, factor):
    section = OptimizerSection(lr=0.5, lr_scaling=kind)
    assert scaling(section, 8) == factor
    assert learning_rate(section, 3, 10, ranks=8) == 0.5 * factor
