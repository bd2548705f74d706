from __future__ import annotations

import json

import pytest

from hpc_train.monitoring.spent import SpentCosts, costs_in


def test_the_start_of_a_large_job_tells_its_costs(tmp_path):
    ranks = [[rank // 64, rank, 0, 0] for rank in range(8192)]
    event = {"event": "start", "ranks": ranks, "node_hours": 50.0, "joules": 5e6}
    other = {"event": "preflight"}
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(event)}\n{json.dumps(other)}\n")
    assert costs_in(tmp_path) == SpentCosts(50.0, 5e6)


@pytest.mark.parametrize(
    ("spent", "words"),
    [
        (SpentCosts(1.25, 3.1e6, 1.25), "1.25 node-hours and 3.1 MJ (861 Wh) so far"),
        (SpentCosts(1282.7, 3.1e10, 1282.7), "1,283 node-hours and 31 GJ (8.61 MWh) so far"),
        (SpentCosts(1.0, 9.999e5, 1.0), "1 node-hours and 1 MJ (278 Wh) so far"),
        (SpentCosts(2.0, 7.2e6, 1.0), "2 node-hours and 7.2 MJ (2 kWh) so far; "
         "the energy was read in 50 % of the time"),
        (SpentCosts(0.5), "0.5 node-hours so far; no energy was read"),
    ],
)  # fmt: skip
def test_costs_in_words(spent, words):
    assert spent.describe() == words


def test_the_files_of_a_killed_job_tell_what_it_has_spent(tmp_path):
    assert costs_in(tmp_path) == SpentCosts()
    many = [{"step": step, "node_hours": step / 1e3, "joules": step} for step in range(1, 3000)]
    lines = [json.dumps(record) for record in many]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3000, "node_h')
    assert costs_in(tmp_path) == SpentCosts(2.999, 2999.0)
    # A later job has dropped these records, and was killed before it wrote one of its own.
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n")
    event = {"event": "start", "node_hours": 3.1, "joules": 3000.0, "metered_node_hours": 3.0}
    (tmp_path / "events.jsonl").write_text(f"[1]\n{'[' * 50_000}\n{json.dumps(event)}\n")
    assert costs_in(tmp_path) == SpentCosts(3.1, 3000.0, 3.0)
