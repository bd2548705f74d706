"""The curves of a page, and the marks of its restarts."""

from __future__ import annotations

from hpc_train.monitoring.records import TRAINER_KEYS
from hpc_train.report.curves import KNOWN, NO_PLOT, curves_of, plots_of
from hpc_train.report.metrics import AMOUNTS
from hpc_train.report.sources import RunSource
from tests.report.runs import BEGIN, record, start, write_lines


def source_of(path):
    source = RunSource(path, "run", 64)
    source.read()
    return source


def test_each_key_that_a_page_knows_has_a_curve_among_any_number_of_others():
    assert {plot.key for plot in KNOWN} | NO_PLOT <= TRAINER_KEYS | AMOUNTS.keys()


def test_the_shares_of_a_mixture_take_no_plot_from_other_keys(tmp_path):
    shares = {f"mixture_share_{number}": 0.02 for number in range(50)}
    write_lines(tmp_path / "metrics.jsonl", [shares | record(1, samples_per_joule=3.0)])
    keys = [plot["key"] for plot in plots_of([source_of(tmp_path)])]
    assert "samples_per_joule" in keys
    assert "mixture_share_0" in keys


def test_a_mark_has_the_steps_that_were_lost_before_an_attempt_that_did_not_train(tmp_path):
    killed = {"time": BEGIN + 95, "event": "end", "step": 95, "reason": "failed", "why": "SIGKILL"}
    refused = {"time": BEGIN + 99, "event": "end", "step": 0, "reason": "failed", "why": "no"}
    events = [start(0, 0), killed, refused | {"before_start": True}, start(120, 80)]
    write_lines(tmp_path / "events.jsonl", events)
    write_lines(tmp_path / "metrics.jsonl", [record(step) for step in range(1, 101)])
    (mark,) = curves_of([source_of(tmp_path)])[0]["marks"]
    assert (mark["step"], mark["lost"]) == (80, 15)
    assert mark["text"] == "restart after step 80: failed: SIGKILL; 15 steps lost"
