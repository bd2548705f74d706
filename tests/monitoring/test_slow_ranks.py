"""A table of all ranks' numbers names the slow rank and the cause, and noise names nobody."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.monitoring.slow_ranks import (
    FORGOTTEN,
    RANK_COLUMNS,
    RankTable,
    SlowRankTracker,
    line,
    slowest,
)

USUAL = {
    "data": 0.001,
    "compute": 0.1,
    "processor": 0.099,
    "scatter": 0.0005,
    "data_scatter": 0.0001,
    "faults": 10.0,
}
PROBED = ("frequency", "temperature", "arithmetic", "memory", "link")
TRIED = {"arithmetic": 0.001, "memory": 0.004}


def table(*slow, ranks=4, stages=None, hosts=None, everyone=None):
    """The table of ranks that are alike but for `slow`: pairs of a rank and its own numbers.

    All ranks end a step together, 5 ms after the last one has come.
    """
    rows = [
        dict.fromkeys(RANK_COLUMNS, 0.0)
        | dict.fromkeys(PROBED, math.nan)
        | USUAL
        | (everyone or {})
        for _ in range(ranks)
    ]
    for rank, numbers in slow:
        rows[rank] |= numbers
    wall = max(row["data"] + row["compute"] for row in rows) + 0.005
    for row in rows:
        row["wall"] = wall
        row["waiting"] = row["waiting"] or wall - row["data"] - row["compute"]
    numbers = np.array([[row[name] for name in RANK_COLUMNS] for row in rows])
    hosts = hosts or [f"node{rank + 1}" for rank in range(ranks)]
    return RankTable(numbers, stages or [0] * ranks, hosts)


LATE = {"compute": 0.15, "processor": 0.149}
CASES = {
    "data": ({"data": 0.03}, "its data takes 30 ms of each step, that of others 1 ms"),
    "load": (
        {"compute": 0.15, "delayed": 0.05, "switches": 12},
        "it computes 150 ms in each step but has a processor only for 100 ms of that, because "
        "other programs use its processor, which it loses 12 times",
    ),
    "load by the hypervisor": (
        {"compute": 0.15, "stolen": 0.049},
        "the hypervisor gives its processor to other machines",
    ),
    "compute": (LATE, "it computes 150 ms in each step, others 100 ms"),
    "compute, more work": (LATE | TRIED, "its processor is as fast as others: it has more work"),
    "compute, a slow clock": (
        LATE | TRIED | {"arithmetic": 0.0015, "memory": 0.005, "frequency": 2e9},
        "a product of matrices takes 1.5 times as long there, at 2.0 GHz beside 3.0 GHz",
    ),
    "compute, something else": (
        {"compute": 0.15, "delayed": 0.001},
        "it stands still for 50 ms of that, although a processor is free",
    ),
    "memory": (LATE | TRIED | {"memory": 0.008}, "a copy in its memory takes 2.0 times as long"),
    "memory, new pages": (LATE | {"faults": 50010}, "has to give it 50000 more pages of memory"),
    "compute, hardly a page": (
        LATE | {"faults": 10.3, "system": 0.04},
        "it computes 150 ms in each step, others 100 ms",
    ),
    "memory, pages on a disk": (
        {"compute": 0.15, "delayed": 0.001, "reads": 30},
        "it reads back from a disk 30 more pages",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_cause_is_what_differs(case, ranks):
    numbers, says = CASES[case]
    tried = {**TRIED, "frequency": 3e9} if "arithmetic" in numbers else {}
    found = slowest(table((1, numbers), ranks=ranks, everyone=tried))
    assert found is not None
    assert (found.rank, found.cause) == (1, case.split()[0].strip(","))
    assert says in found.why
    assert found.seconds == pytest.approx(0.029 if case == "data" else 0.05, rel=0.01)


def test_the_line_says_who_and_what_it_costs():
    found = slowest(table((3, {"data": 0.21, "compute": 0.1})))
    hosts = [f"node{rank + 1}" for rank in range(4)]
    assert line(found, hosts) == (
        "rank 3 (node4) is slow: its data takes 210 ms of each step, that of others 1 ms; all "
        "ranks wait for it 209 ms per step (66 %)"
    )


def test_a_host_whose_ranks_are_all_slow_is_named_by_one_of_them():
    found = slowest(table((2, LATE), (3, LATE | {"compute": 0.151}), hosts=["a", "a", "b", "b"]))
    assert (found.rank, found.cause) == (3, "compute")


def test_ranks_of_other_stages_may_have_more_work():
    assert slowest(table((2, LATE), (3, LATE), stages=[0, 0, 1, 1])) is None
    assert slowest(table((1, LATE), ranks=2, stages=[0, 1])) is None
    assert slowest(table((1, {"data": 0.05}), ranks=2, stages=[0, 1])).cause == "data"


def test_more_work_on_processors_that_all_ranks_share_with_others_is_no_load():
    shared = {"processor": 0.05, "delayed": 0.05}  # half of the time
    found = slowest(table((1, {"compute": 0.2, "processor": 0.1, "delayed": 0.1}), everyone=shared))
    assert (found.rank, found.cause) == (1, "compute")


@pytest.mark.parametrize(
    "numbers",
    [
        {"data": 0.004},
        {"data": 0.03, "data_scatter": 0.02},
        {"compute": 0.15, "processor": 0.149, "scatter": 0.02},
    ],
)
def test_a_small_or_unsteady_delay_names_nobody(numbers):
    assert slowest(table((1, numbers))) is None


def test_a_rank_for_which_nobody_waits_is_not_slow():
    assert slowest(table((1, LATE | {"waiting": 0.03}), everyone={"waiting": 0.03})) is None


@given(st.integers(2, 40), st.integers(0, 10**6), st.floats(0, 0.02))
def test_noise_that_all_ranks_have_names_nobody(ranks, seed, spread):
    generator = np.random.default_rng(seed)
    noise = spread * generator.uniform(-1, 1, ranks)
    slow = [
        (rank, {"compute": 0.1 + more, "processor": 0.099 + more, "scatter": spread})
        for rank, more in enumerate(noise)
    ]
    assert slowest(table(*slow, ranks=ranks)) is None


@given(st.integers(2, 40), st.data(), st.floats(0.01, 10))
def test_the_same_times_in_another_order_or_unit_name_the_same_rank(ranks, data, unit):
    rank = data.draw(st.integers(0, ranks - 1))
    times = ("data", "compute", "processor", "scatter", "data_scatter", "waiting", "delayed")
    one = table((rank, {"data": 0.05}), ranks=ranks)
    rows = np.array(
        [one.columns[name] * (unit if name in (*times, "wall") else 1) for name in RANK_COLUMNS]
    )
    found = slowest(RankTable(rows.T, [0] * ranks, one.hosts))
    assert (found.rank, found.cause) == (rank, "data")
    assert found.share == pytest.approx(slowest(one).share)


def linked(*times):
    """All ranks wait long; and the times of messages, if links were tried."""
    rows = [(rank, {"link": time}) for rank, time in enumerate(times)]
    return table(*rows, everyone={"waiting": 0.08, "compute": 0.1})


def test_a_slow_link_is_that_of_the_host_that_is_slow_with_both_neighbours():
    found = slowest(linked(0.002, 0.002, 0.08, 0.002))
    assert (found.rank, found.cause) == (2, "network")
    assert "between node3 and its neighbours takes 80 ms, between other hosts 2 ms" in found.why


def test_of_two_hosts_nobody_knows_whose_link_is_slow():
    assert slowest(linked(0.08, 0.002)) is None


def test_a_rank_is_named_once_after_two_tables_and_forgotten_when_it_recovers():
    tracker, slow = SlowRankTracker(), table((1, {"data": 0.03}))
    assert tracker.note(slow) is None
    assert tracker.note(slow).rank == 1
    assert [tracker.note(slow) for _ in range(5)] == [None] * 5
    assert tracker.named.rank == 1
    for _ in range(FORGOTTEN):
        assert tracker.note(table()) is None
    assert tracker.named is None


def test_tables_that_disagree_name_nobody():
    tracker = SlowRankTracker()
    for number in range(10):
        assert tracker.note(table((number % 3, {"data": 0.03}))) is None


def test_data_that_takes_most_of_a_step_is_named_at_once():
    assert SlowRankTracker().note(table((1, {"data": 0.5}))).cause == "data"


def test_trials_are_asked_for_only_while_a_cause_is_open():
    tracker = SlowRankTracker()
    tracker.note(table())
    assert not any(tracker.probes)
    tracker.note(table((1, LATE)))
    assert tracker.probes.processor
    tried = table((1, LATE | TRIED | {"memory": 0.008}), everyone=TRIED)
    assert tracker.note(tried).cause == "memory"
    assert not any(tracker.probes)
    tracker.note(table((1, LATE)))
    assert tracker.named.cause == "memory", "as the trial has said"
    assert not any(tracker.probes)


def test_links_are_tried_while_all_wait_and_seldom_if_they_are_fine():
    tracker, asked = SlowRankTracker(), []
    for _ in range(30):
        fine = linked(*[0.002] * 4) if tracker.probes.links else linked()
        assert tracker.note(fine) is None
        asked.append(tracker.probes.links)
    assert asked[0]
    assert 1 < sum(asked) < 4


def test_a_slow_link_is_tried_twice_before_it_is_named():
    tracker = SlowRankTracker()
    tracker.note(linked())
    assert tracker.probes.links
    slow = linked(0.002, 0.002, 0.08, 0.002)
    assert tracker.note(slow) is None
    assert tracker.probes.links
    assert tracker.note(slow).rank == 2
    for _ in range(5):
        tracker.note(linked())
        assert not tracker.probes.links
        assert tracker.named.cause == "network"
    tracker.note(linked(*[0.002] * 4))
    assert tracker.named is None, "the link has recovered"


def test_trials_are_seldom_if_suspicions_come_and_go():
    tracker, asked = SlowRankTracker(), 0
    for _ in range(20):
        for one in (table((1, LATE)), table()):
            tracker.note(one)
            asked += tracker.probes.processor
    assert asked == 2
