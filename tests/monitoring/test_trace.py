"""Marks as events of a trace."""

from __future__ import annotations

import json
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.monitoring.trace import BUCKET, MAIN, STEP, THREADS, Mark, Marks, trace_events
from hpc_train.mpi.clocks import ClockReading, CommonTime
from hpc_train.mpi.phases import StepPhases

SAME = CommonTime(ClockReading(0.0, 0.0), ClockReading(100.0, 100.0))


def by_thread(events):
    """Events with a duration, by the name of their thread."""
    events = json.loads(json.dumps(list(events)))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), max_size=60))
def test_sums_that_overlap_are_in_several_threads_and_keep_their_times(spans):
    marks = [Mark(BUCKET, str(n), b / 1e6, (b + d) / 1e6) for n, (b, d) in enumerate(spans)]
    found = by_thread(trace_events(3, "node2", marks, SAME, 0.0))
    times = {}
    for name, events in found.items():
        assert name.startswith(THREADS[BUCKET])
        last = 0
        for event in sorted(events, key=lambda event: event["ts"]):
            assert event["ts"] >= last - 1e-6
            last = event["ts"] + event["dur"]
            times[int(event["name"])] = (round(event["ts"]), round(event["dur"]))
    assert [times[number] for number in range(len(spans))] == spans
    # no more threads than sums at once
    most = max((sum(b <= at < b + d for b, d in spans) for at, _ in spans), default=0)
    assert len(found) <= max(most, 1)


def test_phases_are_nested_in_one_thread_and_the_rank_has_a_name():
    phases, marks = StepPhases(), Marks()
    phases.listener = marks
    with phases("backward", "backward of micro-batch 1"), phases("communication", "a message"):
        pass
    phases.note(STEP, "step %d", 1.0, 2.0, 7)
    events = list(trace_events(3, "node2", marks.all, SAME, 0.0))
    main = by_thread(events)[MAIN]
    assert [event["name"] for event in main] == ["backward of micro-batch 1", "a message"]
    assert [event["cat"] for event in main] == ["backward", "communication"]
    outer, inner = main
    assert outer["ts"] <= inner["ts"]
    assert outer["ts"] + outer["dur"] >= inner["ts"] + inner["dur"] - 1e-6
    (step,) = by_thread(events)[THREADS[STEP]]
    assert (step["name"], step["ts"], step["dur"]) == ("step 7", 1e6, 1e6)
    (process,) = [event for event in events if event["name"] == "process_name"]
    assert process["args"] == {"name": "rank 3 (node2)"}
    assert {event["pid"] for event in events} == {3}


def test_marks_that_are_too_many_are_counted():
    marks = Marks(most=2)
    for number in range(5):
        marks("data", "", number, number + 1)
    assert (len(marks.all), marks.lost) == (2, 3)
