from __future__ import annotations

import errno
import json
import math
import os
import time

import pytest

from hpc_train import files
from hpc_train.monitoring import records
from hpc_train.monitoring.meter import Meter
from hpc_train.monitoring.records import RecordsFile
from hpc_train.mpi.watch import Watch


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 0.1 * step}) for step in range(1, 6)]
    path.write_text("\n".join(lines) + '\n{"step": 6, "lo')  # the last one was cut off by a kill
    metrics = RecordsFile(path, after_step=3)
    metrics.write({"step": 4, "loss": 7.0})
    metrics.close()
    assert path.read_text().splitlines() == [*lines[:3], '{"step": 4, "loss": 7.0}']
    assert metrics.dropped == {"step": 5, "loss": 0.5}
    again = RecordsFile(path, after_step=4)
    again.close()
    assert again.dropped == {}


@pytest.mark.parametrize("after", [0, 1, 100, 299, 400])
def test_what_a_resume_drops_is_found_from_the_end_in_parts_of_any_size(
    tmp_path, monkeypatch, after
):
    monkeypatch.setattr(records, "PART_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "of": "x" * (step % 90)}) for step in range(1, 301)]
    path.write_text("".join(f"{line}\n" for line in [*lines, "[" * 100_000]))
    before = path.read_bytes()

    def fail(name, function, *arguments):
        if name == "rename":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments)

    with monkeypatch.context() as failing, pytest.raises(OSError, match="Input/output"):
        failing.setattr(files, "call", fail)
        records.RecordsFile(path, after_step=after)
    assert [path.read_bytes(), *tmp_path.iterdir()] == [before, path]
    found = records.RecordsFile(path, after_step=after)
    assert path.read_text().splitlines() == lines[:after]
    assert found.dropped.get("step") == (300 if after < 300 else None)
    found.close()


def test_a_line_that_a_kill_cut_off_spoils_none_after_it(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start", "step": 0}\n{"event": "en')
    events = RecordsFile(path)
    events.write({"event": "start", "step": 4})
    events.close()
    lines = path.read_text().splitlines()
    assert [lines[0], lines[-1]] == [
        '{"event": "start", "step": 0}',
        '{"event": "start", "step": 4}',
    ]


def test_floats_keep_all_their_digits_and_what_json_lacks_is_null(tmp_path):
    metrics = RecordsFile(tmp_path / "metrics.jsonl", after_step=0)
    metrics.write({"step": 1, "loss": 1 / 3, "grad_norm": math.nan, "lr": math.inf})
    record = json.loads((tmp_path / "metrics.jsonl").read_text())  # readable before it is closed
    metrics.close()
    assert record == {"step": 1, "loss": 1 / 3, "grad_norm": None, "lr": None}


class Disk:
    """Takes so many bytes more, then it is full; in between, handles go stale."""

    def __init__(self, room: int) -> None:
        self.room, self.stale = room, False

    def __call__(self, name, function, *arguments):
        if self.stale and name != "create":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self.stale = False
        if name == "append":
            descriptor, data = arguments
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count = function(descriptor, data[: self.room])
            self.room -= count
            return count
        return function(*arguments)


def test_a_full_disk_costs_one_warning_and_no_record(tmp_path, monkeypatch, caplog):
    disk, path = Disk(room=30), tmp_path / "metrics.jsonl"
    monkeypatch.setattr(files, "call", disk)
    metrics = RecordsFile(path, after_step=0)
    for step in range(1, 6):
        metrics.write({"step": step, "loss": 0.5})
    assert caplog.text.count("cannot be written ([Errno 28] No space left on device)") == 1
    disk.room = 1000
    metrics.write({"step": 6, "loss": 0.5})
    assert "can be written again" in caplog.text
    disk.stale = True
    metrics.write({"step": 7, "loss": 0.5})
    metrics.write({"step": 8, "loss": 0.5})
    disk.room = 0
    metrics.write({"step": 9, "loss": 0.5})
    metrics.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 9)]


def test_the_meter_averages_over_the_steps_since_the_last_record():
    watch = Watch()
    meter = Meter(8, watch, tokens_per_sample=100)
    for _ in range(2):
        with watch.phases("backward"):
            time.sleep(0.01)
            with watch("a sum"), watch("a part of it"):
                time.sleep(0.02)
        meter.count_step()
    record = meter.take()
    assert record["step_seconds"] >= record["comm_seconds"] >= 0.02
    assert record["backward_seconds"] >= 0.01
    assert record["step_seconds"] >= record["backward_seconds"] + record["comm_seconds"]
    assert record["samples_per_second"] == pytest.approx(8 / record["step_seconds"])
    assert record["tokens_per_second"] == pytest.approx(800 / record["step_seconds"])
    meter.count_step()
    assert meter.take()["backward_seconds"] == 0
