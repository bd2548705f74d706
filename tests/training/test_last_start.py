"""What a resume on other numbers of replicas and threads says."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from hpc_train.config.file import load
from hpc_train.mpi.group import Group
from hpc_train.training.last_start import tell_last_start
from tests.training.test_trainer import alone, config, make


@pytest.mark.parametrize(
    ("options", "now", "told"),
    [
        (["--optimizer.lr_scaling", "linear"], 2, ""),
        ([], 1, ""),
        (["--gradients.average_every", "4"], 1, "2 -> 1. On their number depend: gradients.ave"),
        (["--parallel.batch_norm", "local"], 3, "2 -> 3. On their number depend: parallel.batch"),
    ],
)
def test_only_what_depends_on_replicas_is_told(tmp_path, caplog, options, now, told):
    caplog.set_level(logging.INFO, "hpc_train")
    starts = [{"event": "start", "layout": {"dp": dp}} for dp in (4, 2)]
    text = "\n".join(json.dumps(one) for one in [*starts, {"event": "end"}])
    (tmp_path / "events.jsonl").write_text(text, encoding="utf-8")
    tell_last_start(Group(), tmp_path, load(options=options), now, threads=1)
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)


@pytest.mark.parametrize("layout", [None, 3, {"dp": None}, {"dp": "4"}])
def test_an_odd_last_start_tells_nothing(tmp_path, caplog, layout):
    start = {"event": "start", "layout": layout, "threads": "2"}
    (tmp_path / "events.jsonl").write_text(json.dumps(start), encoding="utf-8")
    options = ["--run.deterministic", "true", "--optimizer.lr_scaling", "linear"]
    tell_last_start(Group(), tmp_path, load(options=options), replicas=1, threads=1)
    assert not caplog.text


@pytest.mark.mpi(min_size=2)
def test_a_learning_rate_that_follows_the_replicas_is_told(job, together, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    words = ["--optimizer.lr", "0.001", "--optimizer.lr_scaling", "linear"]
    make(config(together / "run", "--run.steps", "1", *words), job).train()
    job.world.barrier()
    told = []
    if job.world.rank == 0:
        make(config(together / "run", "--run.steps", "2", *words), alone()).train()
        told = [r.message for r in caplog.records if "replicas" in r.message]
    job.world.barrier()
    many = job.world.size
    assert (
        told
        == [
            f"changed since the last start: replicas {many} -> 1. On their number depend: "
            f"optimizer.lr_scaling linear (peak learning rate {many / 1000:g} -> 0.001)"
        ][job.world.rank :]
    )


def test_a_deterministic_resume_on_another_number_of_threads_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so the number of this test stays
    before = torch.get_num_threads()
    told = []
    try:
        for steps, threads in enumerate((2, 2, 3), 1):
            torch.set_num_threads(threads)
            with make(config(tmp_path, "--run.steps", str(steps)), alone()) as trainer:
                trainer.train()
            told.append([line for line in caplog.messages if "OMP_NUM_THREADS=2" in line])
    finally:
        torch.set_num_threads(before)
    assert [len(lines) for lines in told] == [0, 0, 1]
    assert "computed with 2 threads before this start, and have 3 now" in told[-1][0]
