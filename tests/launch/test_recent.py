"""What the last records of a run say."""

from __future__ import annotations

import json
import math

from hypothesis import example, given
from hypothesis import strategies as st

from hpc_train.launch.recent import BLOCKS, LAST_BYTES, RecentRecords, sparkline

STEPS = "run: {steps: 1000}\n"


def recent(folder, records, text=""):
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + text)
    return RecentRecords(folder)


def record(step, **values):
    times = {"step_seconds": 2.0, "comm_seconds": 0.5, "data_seconds": 0.02}
    return {"step": step, "loss": 4.0 - step, "tokens_per_second": 1e4} | times | values


def test_speed_work_left_and_waiting(tmp_path):
    (tmp_path / "config.yaml").write_text(STEPS)
    # The first step is slower than all others. A step with a checkpoint is no typical one.
    seconds = {1: 300.0, 10: 2.0, 19: 2.0, 20: 22.0}
    found = recent(tmp_path, [record(step, step_seconds=one) for step, one in seconds.items()])
    assert found.lines() == [
        "speed: 2 s per step, 10,000 tokens/s",
        "left: 980 of 1000 steps, about 49 min 52 s",
        "waiting of rank 0: 25% for other ranks, 1% for data",
    ]
    assert found.lines("stopped")[1] == "left: 980 of 1000 steps"
    assert found.lines("finished")[1] == "ended after 20 of 1000 steps"
    assert recent(tmp_path, [record(1000)]).lines()[1] == "all of its 1000 steps are done"


def test_rates_below_one_and_huge_losses_are_short(tmp_path):
    slow = {"step_seconds": 30.0, "samples_per_second": 0.27}
    found = recent(tmp_path, [{"step": step, "loss": 1e308} | slow for step in (1, 2, 3)])
    assert found.lines()[0] == "speed: 30 s per step, 0.27 samples/s"
    assert found.curves(40)[0].endswith(" 1e+308 (1e+308 to 1e+308)")


def test_a_record_says_itself_when_it_was_made(tmp_path):
    assert recent(tmp_path, [record(1, time=1e9)], '{"step": 2, "lo').written == 1e9
    assert recent(tmp_path, [record(1)]).written > 1e9, "the time of the file"


def test_the_records_of_an_earlier_start_count_until_there_is_one_of_the_newest(tmp_path):
    (tmp_path / "config.yaml").write_text(STEPS)
    events = [{"event": "start", "after": 0}, {"event": "start", "after": 50}]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    records = [record(step, step_seconds=8.0) for step in range(1, 51)]
    assert recent(tmp_path, records).lines()[0].startswith("speed: 8 s per step")
    records += [record(51, step_seconds=30.0)]
    assert recent(tmp_path, records).lines()[0].startswith("speed: 30 s per step")
    lines = recent(tmp_path, [*records, record(100)]).lines()
    assert lines[0].startswith("speed: 2 s per step")
    assert lines[1] == "left: 900 of 1000 steps, about 30 min"


def test_records_without_measurements_say_nothing(tmp_path):
    for text in ("", "run: {steps: null, epochs: 3}\n", "run: [\n", "[]", "run: 3"):
        (tmp_path / "config.yaml").write_text(text)
        assert recent(tmp_path, [{"step": 1, "loss": 3.0}]).lines() == []
        assert recent(tmp_path, [{"step": 1, "step_seconds": None}]).lines() == []
    assert recent(tmp_path, []).last == {}
    assert RecentRecords(tmp_path / "missing").curves(40) == []


def test_the_last_step_of_a_run_of_epochs_is_that_of_its_newest_start(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {steps: null, epochs: 3}\n")
    events = [{"event": "start", "steps": 500}, {"event": "start", "steps": 400}]
    events += [{"event": "slow", "why": "start" * 9}] * (LAST_BYTES // 50)
    lines = [json.dumps(event) for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "start", "st')
    assert recent(tmp_path, [record(10)]).lines()[1] == "left: 390 of 400 steps, about 13 min"


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    found = recent(tmp_path, [record(1), record(2)], '{"step": 3, "lo')
    assert found.last["step"] == 2


def test_only_the_end_of_a_long_file_is_read(tmp_path):
    found = recent(tmp_path, [record(step) for step in range(5000)])
    steps = found.values("step")
    assert steps == list(range(5000 - len(steps), 5000))
    assert LAST_BYTES * 0.9 < sum(len(json.dumps(one)) + 1 for one in found.records) <= LAST_BYTES


def test_curves_of_loss_and_throughput(tmp_path):
    found = recent(tmp_path, [record(step, samples_per_second=3.0) for step in range(3)])
    assert found.curves(40) == [
        "loss      █▅▁ 2 (2 to 4)",
        "tokens/s  ▄▄▄ 10,000 (10,000 to 10,000)",
    ]
    for one in found.records:
        del one["tokens_per_second"]
    assert found.curves(40)[1] == "samples/s ▄▄▄ 3 (3 to 3)"
    del found.records[2:]
    assert found.curves(40) == [], "two points are no curve"


def test_a_sparkline_shows_the_shape():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BLOCKS
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([0, math.nan, 7], 3) == "▁ █"
    assert sparkline([], 5) == ""
    assert sparkline([-1.7e308, 1.7e308, 1.7e308], 2) == "▁█"


@given(st.lists(st.floats()), st.integers(1, 50))
@example([1.7976931348623157e308] * 3, 1)
def test_a_sparkline_has_a_character_for_each_part(values, width):
    drawn = sparkline(values, width)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= {*BLOCKS, " "}
