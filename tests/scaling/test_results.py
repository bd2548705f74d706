"""What is read of a run: steps after the warm-up, phases, energy."""

from __future__ import annotations

import json

import pytest

from hpc_train.scaling.results import read_run
from tests.scaling.studies import write_run


def test_the_warm_up_does_not_count(tmp_path):
    write_run(tmp_path, 2, 0.5)
    run = read_run(tmp_path, 2, warmup=1)
    assert run.seconds == (0.5, 0.5, 0.5)
    assert run.median == 0.5
    assert run.error == 0
    assert run.phases["forward"] == pytest.approx(0.05)
    assert run.joules is None


@pytest.mark.parametrize("text", ["", "{", "{}", '{"seconds": {"step": []}}', '{"seconds": []}'])
def test_a_result_that_is_being_written_is_none_yet(tmp_path, text):
    (tmp_path / "performance.json").write_text(text)
    assert read_run(tmp_path, 1, warmup=1) is None
    assert read_run(tmp_path / "none", 1, warmup=1) is None


def test_energy_is_that_after_the_warm_up(tmp_path):
    write_run(tmp_path, 1, 0.5, batch=4)
    records = [{"step": 1, "joules": 1000.0}, {"step": 2}, {"step": 2, "joules": 1100.0}]
    records.append({"step": 4, "joules": 1260.0})
    lines = [*(json.dumps(record) for record in records), '{"step": 5, "jou']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_run(tmp_path, 1, warmup=2).joules == pytest.approx(160 / (2 * 4))
    assert read_run(tmp_path, 1, warmup=3).joules is None, "a single record tells no difference"
