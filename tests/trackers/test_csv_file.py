from __future__ import annotations

import csv

from hpc_train.cli.log import export_run
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
