"""Curves of any length in few buckets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.report.decimation import Decimation


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6) | st.just(np.nan), max_size=40), max_size=12),
    st.sampled_from([2, 4, 16]),
    st.integers(1, 16),
)
def test_no_extreme_and_no_mean_is_lost(chunks, most, wanted):
    kept = Decimation(most)
    first = 1
    for chunk in chunks:
        kept.add(np.arange(first, first + len(chunk), dtype=float), {"loss": np.array(chunk)})
        first += len(chunk)
    values = np.array([value for chunk in chunks for value in chunk])
    curves, width = kept.used(wanted)
    assert width & (width - 1) == 0
    assert (curves["loss"].low.size if curves else 0) <= min(most, wanted)
    for number in range(len(curves["loss"].low) if curves else 0):
        part = values[number * width : (number + 1) * width]
        part = part[np.isfinite(part)]
        assert curves["loss"].count[number] == len(part)
        if len(part):
            assert curves["loss"].low[number] == part.min()
            assert curves["loss"].high[number] == part.max()
            np.testing.assert_allclose(curves["loss"].mean()[number], part.mean(), atol=1e-6)
        else:
            assert np.isnan(curves["loss"].low[number])
    there = np.flatnonzero(np.isfinite(values))
    if len(there):
        place = there[np.argmin(values[there])]
        assert curves["loss"].least == (values[place], place + 1)
        assert curves["loss"].last == (values[there[-1]], there[-1] + 1)


def test_a_key_that_appears_late_stands_at_its_place():
    kept = Decimation(8)
    for step in range(1, 101):
        columns = {"loss": np.array([float(step)])}
        if step == 90:
            columns["validation_loss"] = np.array([7.0])
        kept.add(np.array([float(step)]), columns)
    curves, width = kept.used(8)
    assert np.flatnonzero(curves["validation_loss"].count).tolist() == [(90 - 1) // width]
    assert len(curves["validation_loss"].low) == len(curves["loss"].low)
