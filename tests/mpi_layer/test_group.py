"""How the ranks of a group wait for each other."""

from __future__ import annotations

import time

import pytest

from hpc_train.mpi.group import Group

pytestmark = pytest.mark.mpi

LATE = 0.5  # seconds


@pytest.mark.ranks(4, later=(2,))
def test_a_rank_that_waits_leaves_its_core_where_ranks_share_cores(group):
    with_own = Group.of(group.comm)
    with_own.waiting.polite = True
    for wait in (
        lambda: with_own.largest(group.rank),
        lambda: with_own.gathered("x"),
        lambda: with_own.from_first(lambda: "x"),
        with_own.barrier,
    ):
        begin = time.thread_time()
        if group.rank == 0:
            time.sleep(LATE)
        wait()
        assert time.thread_time() - begin < LATE / 2
    with_own.close()
