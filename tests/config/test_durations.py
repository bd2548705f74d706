"""Time spans: what is written is read back, and every form means the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.durations import format_duration, parse_duration

SECONDS = st.integers(0, 10**8)


@given(SECONDS)
def test_what_is_written_is_read(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


@given(SECONDS)
def test_every_form_means_the_same(seconds):
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    for text in (
        str(seconds),
        f"{seconds}s",
        f"{hours}:{m:02d}:{s:02d}",
        f"{days}-{h:02d}:{m:02d}:{s:02d}",
        f"{days}d{h}h{m}m{s}s",
        f"{minutes}m{s}s",
    ):
        assert parse_duration(text) == seconds, text


@given(st.text(alphabet="0123456789:-dhms. x", max_size=12))
def test_other_texts_are_none(text):
    """What is taken for a time span is not negative, and its own form reads back equal."""
    seconds = parse_duration(text)
    if seconds is not None:
        assert seconds >= 0
        assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "12:00", "1:60:00", "1:00:60", "-5", "1.5h", "2h30", "30m2h", "1-2", "UNLIMITED"],
)
def test_what_is_ambiguous_or_wrong_is_refused(text):
    assert parse_duration(text) is None
