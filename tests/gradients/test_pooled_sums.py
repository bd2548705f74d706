"""Buckets that use a piece of memory in turn: a property of their places."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.gradients.pooled_sums import Turns


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 60))
def test_a_buffer_is_used_when_all_before_it_that_share_its_memory_are_done(sizes, more):
    """Play two rounds, and look who else has written to the bytes of each buffer since its turn."""
    room = max(sizes) + more
    turns = Turns(sizes, room)
    writer: list[int | None] = [None] * room
    for turn in range(2 * len(sizes)):
        number = turn % len(sizes)
        begin = turns.begins[number]
        assert begin + sizes[number] <= room
        there = {by for by in writer[begin : begin + sizes[number]] if by is not None}
        if there and turn >= len(sizes):
            assert turn - max(there) == turns.before[number], "the newest one to wait for"
        writer[begin : begin + sizes[number]] = [turn] * sizes[number]
