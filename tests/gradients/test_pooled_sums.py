"""Buckets that use a piece of memory in turn: a property of their places, and whose turn it is."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.division import Reach
from hpc_train.gradients.pooled_sums import PooledSums, Turns
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels


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


def test_a_thread_may_begin_and_end_sums_while_the_program_asks_what_is_free(monkeypatch):
    buckets = [Bucket([Parameter(torch.zeros(16))]) for _ in range(4)]
    sums = PooledSums(Levels.of(Group()), buckets, None, [Reach.NODE] * 4)
    next(sums.begin_pass(0, first=True, last=True))
    others = iter((1, 2, 3))

    def meet(one, other):
        for number in others:  # what the thread does between two looks of the program
            next(sums.begin_pass(number, first=True, last=True))
        return one == other

    monkeypatch.setattr(sums.turns, "meet", meet)
    assert sums.free(3)
    assert not sums.free(0)
