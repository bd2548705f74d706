"""Clocks with offsets and drifts are brought to one."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.mpi.clocks import ClockComparison, ClockExchange, CommonTime, reading_of
from hpc_train.mpi.group import Group

OFFSET, DRIFT = 5.0, 50e-6  # the most that a test's clock is wrong by: seconds, seconds per second
WITHIN = 1e-3  # seconds


@dataclass
class WrongClock:
    """A clock that is ahead of the true one, and gains on it.

    Args:
        offset: seconds that it is ahead at `since`.
        drift: seconds per second.
        since: true seconds.
    """

    offset: float
    drift: float
    since: float

    def of(self, true: float) -> float:
        """What it shows at a true time."""
        return true + self.offset + self.drift * (true - self.since)

    def true(self, shown: float) -> float:
        """The true time at which it shows something."""
        return self.since + (shown - self.since - self.offset) / (1 + self.drift)


offsets, drifts = st.floats(-OFFSET, OFFSET), st.floats(-DRIFT, DRIFT)
ways = st.tuples(st.floats(1e-6, 5e-3), st.floats(1e-6, 5e-3))  # seconds there and back


def exchanges(clock, begin, delays):
    """Questions one after the other, from a true time on. The other's clock is right."""
    for there, back in delays:
        arrives = begin + there
        yield ClockExchange(clock.of(begin), arrives, clock.of(arrives + back))
        begin = arrives + back


@given(offsets, drifts, st.lists(ways, min_size=1, max_size=40))
def test_a_reading_is_as_exact_as_it_says_however_the_delays_differ(offset, drift, delays):
    clock = WrongClock(offset, drift, since=1e5)
    reading = reading_of(list(exchanges(clock, 1e5, delays)))
    assert reading.error <= min(map(sum, delays)) / 2 * (1 + DRIFT) + 1e-9
    assert abs(clock.true(reading.own) - reading.reference) <= reading.error + 1e-9


@given(
    offsets,
    drifts,
    st.floats(1e-2, 1e5),
    st.floats(0, 1),
    *(st.lists(ways, min_size=20, max_size=20) for _ in range(2)),
)
def test_times_between_two_readings_are_as_exact_as_these(offset, drift, span, share, first, last):
    """Seconds or a day apart: the drift is interpolated, and nothing is extrapolated."""
    clock, ends = WrongClock(offset, drift, since=1e5), 1e5 + 1 + span
    begin, end = (reading_of(list(exchanges(clock, *how))) for how in ((1e5, first), (ends, last)))
    common = CommonTime(begin, end)
    event = begin.reference + share * (end.reference - begin.reference)
    assert abs(common(clock.of(event)) - event) <= common.error + 1e-8
    assert abs(common.drift + drift) <= 2 * common.error / span + 1e-8


def compare(job, monkeypatch, seconds):
    """Give each process a wrong clock, and let it note events for some seconds.

    Returns:
        Seconds by which the common times of its events are wrong at most, and the error that the
        comparison itself gives.
    """
    world, truly = job.world, time.perf_counter
    draw = random.Random(f"{os.getpid()} {truly()}")
    mine = draw.uniform(-OFFSET, OFFSET), draw.uniform(-DRIFT, DRIFT)
    since = world.from_first(truly)
    everyone = [WrongClock(*drawn, since) for drawn in world.gathered(mine)]
    clock = everyone[world.rank]
    monkeypatch.setattr(time, "perf_counter", lambda: clock.of(truly()))
    # Each process is a host of its own.
    comparison = ClockComparison(world, Group(waiting=world.waiting))
    begin = comparison.read()
    events = []
    while truly() < since + seconds:
        events.append(truly())
        time.sleep(min(seconds / 50, 1))
    common = CommonTime(begin, comparison.read())
    comparison.close()
    monkeypatch.undo()
    wrong = [abs(everyone[0].true(common(clock.of(true))) - true) for true in events]
    worst = world.gathered((max(wrong), common.error))
    return [max(some) for some in zip(*worst, strict=True)]


@pytest.mark.mpi
@pytest.mark.parametrize("seconds", [1, pytest.param(600, marks=pytest.mark.long)])
def test_events_of_processes_with_wrong_clocks_come_to_one_clock(job, monkeypatch, seconds):
    wrong, error = compare(job, monkeypatch, seconds)
    assert wrong <= error + 1e-6
    assert wrong < WITHIN


@pytest.mark.mpi
def test_ranks_of_one_host_have_one_clock(job):
    comparison = ClockComparison(job.world, job.node)
    begin = comparison.read()
    common = CommonTime(begin, comparison.read())
    comparison.close()
    errors = job.world.gathered((common.error, abs(common(3.0) - 3.0)))
    assert errors == [(0.0, 0.0)] * job.world.size
