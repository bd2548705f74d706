"""Lengths of time in words."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.times import time_text

SIZES = {"d": 86400, "h": 3600, "min": 60, "s": 1, "ms": 1e-3, "us": 1e-6}


def test_long_times_have_two_units_and_short_ones_three_digits():
    told = [time_text(seconds) for seconds in (59.4, 59.7, 60, 125, 12000, 86400, 200000, -90)]
    assert told == [
        *("59.4 s", "1 min", "1 min", "2 min 5 s", "3 h 20 min", "1 d", "2 d 7 h", "-1 min 30 s")
    ]
    told = [time_text(seconds) for seconds in (0, 1, 0.99999, 0.00252, 1.8e-2, 1.412e-6, 3e-8)]
    assert told == ["0 s", "1 s", "1 s", "2.52 ms", "18 ms", "1.41 us", "0.03 us"]


@given(st.floats(1e-5, 1e7))
def test_the_words_are_the_time_up_to_their_last_digit(seconds):
    parts = re.findall(r"(\d+(?:\.\d+)?) (\w+)", time_text(seconds))
    assert 1 <= len(parts) <= 2
    said = sum(float(number) * SIZES[unit] for number, unit in parts)
    last = SIZES[parts[-1][1]] if seconds >= 59.5 else 0.0051 * seconds
    whole = 60 * last if len(parts) == 1 and seconds >= 59.5 else last  # a second unit of 0
    assert abs(said - seconds) <= whole + 0.5
