"""Who is to blame for a hang, from what the ranks answer; and what a rank records of its waits."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.mpi.watch import Watch
from hpc_train.mpi.watchdog import State, Watchdog, blame, named, watch_over

SUM = State("a sum over 4 ranks", 30.2)
BUSY = State("", 31.0)
HOSTS = ["node1", "node1", "node2", "node3"]


def test_a_rank_that_does_not_answer_is_named_with_its_host_and_the_operation():
    error = blame(0, {0: SUM, 1: BUSY, 2: SUM}, HOSTS)
    assert "rank 3 (node3) does not answer" in error.cause
    assert "rank 0 (node1) has waited 30 s for a sum over 4 ranks" in error.cause
    assert "rank 1" not in error.cause, "it may well be busy on the way to the others"
    assert "start the same command again" in error.remedy


def test_if_all_ranks_answer_those_in_no_operation_are_blamed():
    error = blame(2, {0: SUM, 1: BUSY, 2: State("an agreement", 9.0), 3: BUSY}, HOSTS)
    assert "rank 1 (node1), rank 3 (node3) do not come" in error.cause
    assert "rank 2 (node2) has waited 9 s for an agreement" in error.cause
    assert "raise hang_timeout" in error.remedy


def test_if_all_ranks_wait_each_operation_is_named_with_its_ranks():
    barrier = State("a barrier", 30.0)
    error = blame(1, {0: SUM, 1: SUM, 2: barrier, 3: SUM}, HOSTS)
    assert "all ranks wait for each other" in error.cause
    assert "ranks 0-1 (node1), rank 3 (node3) for a sum over 4 ranks" in error.cause
    assert "rank 2 (node2) for a barrier" in error.cause


@given(st.sets(st.integers(0, 9999)), st.integers(0, 9999), st.integers(1, 300))
def test_the_message_is_one_short_line_at_any_size(silent, asker, per_node):
    hosts = [f"node{rank // per_node:04d}" for rank in range(10_000)]
    silent = silent - {asker}
    states = {rank: SUM for rank in range(10_000) if rank not in silent}
    text = str(blame(asker, states, hosts))
    assert len(text) < 400
    assert "\n" not in text
    first = min(silent, default=0)
    assert f"{first} ({hosts[first]})" in text or f"{first}-" in text


@given(st.sets(st.integers(0, 60)), st.integers(1, 9))
def test_names_stand_for_all_ranks_that_are_given(ranks, per_node):
    hosts = [f"n{rank // per_node}" for rank in range(61)]
    count = 0
    for part in named(sorted(ranks), hosts).replace(" and ", ", and ").split(", "):
        if part.startswith("and "):
            count += int(part.split()[1])
        elif part:
            first, _, last = part.split()[1].partition("-")
            count += int(last or first) - int(first) + 1
            assert all(f"({hosts[rank]})" in part for rank in range(int(first), int(last or 0)))
    assert count == len(ranks)


def test_nested_waits_are_reported_innermost_first_and_restart_the_outer_count():
    watch = Watch()
    assert watch.now[0] == ""
    with watch("the groups"):
        before = watch.now
        with watch("an agreement"):
            assert watch.now[0] == "an agreement"
        assert watch.now[0] == "the groups"
        assert watch.now != before
    assert watch.now[0] == ""


def test_a_watch_is_clear_after_an_error():
    watch = Watch()
    try:
        with watch("a sum"):
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert watch.now[0] == ""


@pytest.mark.parametrize("timeout", [6.0, 60.0, 1800.0])
def test_no_rank_waits_longer_than_the_limit_before_it_asks(timeout):
    watchdog = Watchdog.__new__(Watchdog)
    watchdog.timeout, watchdog.watch, watchdog.period = timeout, Watch(), min(1.0, timeout / 12)
    waits = []
    for watchdog.rank in (0, 1, 7, 100, 100_000):
        waits.append(watchdog.patience)
    assert waits == sorted(waits)
    assert waits[0] < waits[1] < waits[2]
    assert waits[-1] <= watchdog.limit


def watchdogs():
    """Also those of loops that other tests have left open."""
    return {thread for thread in threading.enumerate() if thread.name == "watchdog"}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("timeout", [0, 100])
def test_the_watchdog_runs_only_with_a_timeout_and_several_ranks(group, timeout):
    before = watchdogs()
    with watch_over(group, timeout):
        assert bool(watchdogs() - before) == (timeout > 0 and group.size > 1)
    assert not watchdogs() - before


@pytest.mark.mpi
def test_a_rank_that_leaves_by_an_error_waits_for_nobody_and_is_not_waited_for(job):
    before = watchdogs()
    if job.world.rank == 0:
        with pytest.raises(ZeroDivisionError), watch_over(job.world, 100):
            raise ZeroDivisionError
    else:
        with watch_over(job.world, 100):
            pass
    assert not watchdogs() - before
