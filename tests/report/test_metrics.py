"""Reading metrics.jsonl, whole or not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpc_train.report import metrics as module
from hpc_train.report.metrics import Metrics
from tests.report.runs import record, write_lines


def read(path):
    found = Metrics(path)
    found.update()
    return found


def test_new_lines_are_read_once_and_a_half_written_one_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [record(1), record(2)])
    found = read(path)
    line = json.dumps(record(3)) + "\n"
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        found.update()
        assert (found.decimation.records, found.damaged) == (2, 0)
        file.write(line[20:])
    found.update()
    found.update()
    assert (found.decimation.records, found.damaged) == (3, 0)
    assert found.decimation.curves["step"].low[:3].tolist() == [1, 2, 3]


def test_a_resume_that_drops_steps_is_read_afresh(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [record(step, loss=float(step)) for step in range(1, 6)])
    found = read(path)
    write_lines(tmp_path / "new", [record(step, loss=float(-step)) for step in range(1, 4)])
    (tmp_path / "new").replace(path)
    found.update()
    assert found.decimation.records == 3
    assert found.decimation.curves["loss"].least == (-3.0, 3.0)
    path.unlink()
    found.update()
    assert not found.decimation.curves


def test_a_longer_file_that_has_the_inode_of_the_one_before_is_read_afresh(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [record(step) for step in range(1, 41)])
    found = read(path)
    write_lines(path, [record(step, time=float(step)) for step in range(1, 61)])  # in its place
    found.update()
    assert (found.decimation.records, found.damaged) == (60, 0)
    assert found.decimation.curves["time"].low[:60].tolist() == list(range(1, 61))


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1, 2]",
        b'{"loss": 1}',
        b'{"step": "two"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"step": null}',
    ],
)
def test_a_damaged_line_is_counted_and_the_others_are_read(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps(record(step)).encode() for step in (1, 2)]
    path.write_bytes(good[0] + b"\n" + line + b"\n\n" + good[1] + b"\n")
    found = read(path)
    assert (found.decimation.records, found.damaged) == (2, 1)


def test_nulls_of_nan_are_counted_and_missing_keys_are_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(
        path,
        [
            record(1, validation_loss=4.0),
            record(2, loss=None),
            record(3, loss=float("nan")),
            record(4, loss="text"),
            record(5, loss=10**400),
        ],
    )
    found = read(path)
    assert found.not_finite == {"loss": (2, 2.0, 3.0)}
    assert found.decimation.curves["loss"].count[:5].tolist() == [1, 0, 0, 0, 0]


def test_amounts_follow_steps_that_are_not_logged_and_a_changed_batch(tmp_path):
    path = tmp_path / "metrics.jsonl"
    twice = {"samples_per_second": 80.0, "tokens_per_second": 800.0}
    slow = {"samples_per_second": None}
    write_lines(path, [record(1), record(5), record(7, **twice), record(8, **slow)])
    curves = read(path).decimation.curves
    assert curves["samples"].low[:4].tolist() == [20, 100, 180, 220]  # 20 a step, then 40
    assert curves["tokens"].low[:3].tolist() == [200, 1000, 1800]


def test_a_mean_is_over_steps_and_leaves_out_the_first_record_of_each_start(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def timed(step, seconds):
        return record(step, step_seconds=seconds, data_seconds=seconds / 2, mfu=1 / seconds)

    found = Metrics(path)
    write_lines(path, [timed(1, 64.0)])
    found.update()
    assert found.means.mean("step_seconds") == 64, "there is no other"
    assert np.isnan(found.means.mean("energy"))
    records = [timed(1, 64.0), timed(100, 1.0), timed(101, 4.0), timed(160, 64.0), timed(200, 2.0)]
    write_lines(path, records)
    found = Metrics(path)
    found.update([0, 150])
    seconds = 99 * 1 + 1 * 4 + 40 * 2
    assert found.means.mean("step_seconds") == pytest.approx(seconds / 140)
    assert found.means.mean("data_seconds") == pytest.approx(seconds / 140 / 2)
    assert found.means.mean("mfu") == pytest.approx(140 / seconds), "work of all over time of all"


def test_curves_do_not_depend_on_the_size_of_what_is_read_at_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [record(step, loss=float(np.sin(step))) for step in range(1, 3000)])
    whole = read(path).decimation
    monkeypatch.setattr(module, "CHUNK", 1000)
    parts = read(path).decimation
    assert whole.width == parts.width
    for key, curve in whole.curves.items():
        np.testing.assert_array_equal(curve.low, parts.curves[key].low)
        np.testing.assert_array_equal(curve.high, parts.curves[key].high)


def test_a_file_with_thousands_of_keys_keeps_few(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [record(1) | {f"key{number}": 1 for number in range(5000)}])
    found = read(path)
    assert "loss" in found.decimation.curves
    assert len(found.decimation.curves) < 100
    assert found.left_out


def test_our_own_keys_have_a_curve_however_many_others_there_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    others = {f"mixture_share_{number}": 0.01 for number in range(100)}
    scored = {"validation_loss": 2.0, "validation_auc": 0.5}
    write_lines(path, [others | record(1), others | record(2) | scored])
    found = read(path)
    assert record(1).keys() - {"epoch"} | scored.keys() <= found.decimation.curves.keys()
    assert found.left_out <= others.keys()


def test_lists_of_one_length_are_no_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [record(step, sizes=[1, 2]) for step in (1, 2)])
    found = read(path)
    assert (found.decimation.records, "sizes" in found.decimation.curves) == (2, False)
