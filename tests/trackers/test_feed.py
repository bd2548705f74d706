"""What reaches a tracker, whatever happens to the job and to the export."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.errors import UserError
from hpc_train.trackers.feed import Feed
from hpc_train.trackers.source import TrackedRun, numbers_of
from tests.trackers.runs import MadeRun, losses


class Memory:
    """A sink that survives the feeds which it is given to, as files do."""

    def __init__(self) -> None:
        self.records, self.mark, self.marked = {}, {}, 0

    def read_mark(self):
        return self.mark

    def begin(self, after):
        self.records = {step: loss for step, loss in self.records.items() if step <= after}
        return after

    def log(self, record):
        assert record["step"] not in self.records
        self.records[record["step"]] = record["loss"]

    def write_mark(self, mark):
        self.mark = mark

    def end_pass(self):
        pass

    def close(self):
        pass


def export(run: MadeRun, sink: Memory) -> int:
    feed = Feed(TrackedRun(run.path, run.path), "memory", sink)
    try:
        return feed.pass_on()
    finally:
        feed.close()


JOBS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5), st.booleans()), max_size=6)


@settings(max_examples=30)
@given(JOBS)
def test_each_record_arrives_once_however_often_the_run_resumes(tmp_path_factory, jobs):
    run, sink, last = MadeRun(tmp_path_factory.mktemp("runs") / "run"), Memory(), 0
    for share, steps, exported in jobs:
        after = int(share * last)
        last = after + steps
        run.job(after, last)
        if exported:
            export(run, sink)
            assert sink.records == losses(run.path)
            assert export(run, sink) == 0
    if jobs:
        export(run, sink)
        assert sink.records == losses(run.path)


def test_a_start_that_does_not_say_after_which_step_changes_nothing(tmp_path):
    run, sink = MadeRun(tmp_path / "run"), Memory()
    run.job(0, 4)
    export(run, sink)
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"event": "start", "time": 5000.0}\n')
    assert export(run, sink) == 0
    run.job(2, 6)
    assert export(run, sink) == 4
    assert sink.records == losses(run.path)


def test_what_a_killed_export_has_logged_is_not_doubled(tmp_path):
    run, sink = MadeRun(tmp_path / "run"), Memory()
    run.job(0, 4)
    export(run, sink)
    before = sink.mark
    run.job(4, 8)
    export(run, sink)
    sink.mark = before  # as if it had been killed before it wrote its mark
    assert export(run, sink) == 4
    assert sink.records == losses(run.path)


def test_half_a_line_is_left_for_the_next_call(tmp_path):
    run, sink = MadeRun(tmp_path / "run"), Memory()
    run.job(0, 2)
    line = json.dumps(run.record(3)) + "\n"
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(line[:10])
        file.flush()
        feed = Feed(TrackedRun(run.path, run.path), "memory", sink)
        assert feed.pass_on() == 2
        file.write(line[10:])
        file.flush()
        assert feed.pass_on() == 1
        feed.close()


def test_a_run_that_was_begun_anew_under_its_name_replaces_the_old_one(tmp_path):
    run, sink = MadeRun(tmp_path / "run"), Memory()
    run.job(0, 6)
    export(run, sink)
    for name in ("metrics", "events"):
        (run.path / f"{name}.jsonl").unlink()
    run.job(0, 3)
    export(run, sink)
    assert sink.records == losses(run.path)


def test_two_processes_do_not_write_to_one_place(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.job(0, 1)
    feed = Feed(TrackedRun(run.path, run.path), "memory", Memory())
    with pytest.raises(UserError, match="another process writes to memory"):
        export(run, Memory())
    feed.close()
    assert export(run, Memory()) == 1


def test_numbers_have_names_by_what_they_measure():
    record = {"step": 3, "time": 5.0, "loss": 1.5, "lr": 1, "grad_norm": None, "memory_gb": 2.0}
    record |= {"validation_loss": 2.5, "validation_a/b": 0.5, "data_seconds": 0.1}
    record |= {"tokens_per_second": 7.0, "tflops": 2.0, "cause": "text"}
    assert numbers_of(record) == {
        "train/loss": 1.5,
        "train/lr": 1.0,
        "job/memory_gb": 2.0,
        "validation/loss": 2.5,
        "validation/a_b": 0.5,
        "time/data_seconds": 0.1,
        "speed/tokens_per_second": 7.0,
        "speed/tflops": 2.0,
    }
