from __future__ import annotations

import csv

import pytest

from hpc_train.cli.log import export_run
from hpc_train.errors import DataError
from hpc_train.trackers import feed
from hpc_train.trackers.source import TrackedRun
from tests.trackers.runs import MadeRun, losses


def test_csv_has_each_record_once_and_a_column_for_each_key(tmp_path):
    run = MadeRun(tmp_path / "run")
    for after, last in ((0, 9), (6, 12), (3, 7)):
        run.job(after, last)
        export_run(TrackedRun(run.path, tmp_path / "out"), "csv")
        with (tmp_path / "out" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert {int(row["step"]): float(row["loss"]) for row in rows} == losses(run.path)
        assert [row["step"] for row in rows if row["validation_auc"]] == ["4", "8", "12"][
            : last // 4
        ]


def test_an_export_that_fails_leaves_the_rows_that_were_there(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "READ_BYTES", 500)
    run = MadeRun(tmp_path / "run")
    run.job(0, 20)
    export_run(TrackedRun(run.path, run.path), "csv")
    before = (run.path / "metrics.csv").read_text()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21}\n')
    with pytest.raises(DataError, match="the time of the record is None"):
        export_run(TrackedRun(run.path, run.path), "csv")
    assert (run.path / "metrics.csv").read_text() == before
    assert not [*run.path.glob(".metrics*")]
