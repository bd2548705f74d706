"""What a resume on another number of replicas says."""

from __future__ import annotations

import json
import logging

import pytest

from hpc_train.config.file import load
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.replicas import tell_other_replicas
from tests.training.test_trainer import config, make


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
    tell_other_replicas(Group(), tmp_path, load(options=options), now)
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)


@pytest.mark.mpi(min_size=2)
def test_a_learning_rate_that_follows_the_replicas_is_told(job, together, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    words = ["--optimizer.lr", "0.001", "--optimizer.lr_scaling", "linear"]
    make(config(together / "run", "--run.steps", "1", *words), job).train()
    job.world.barrier()
    told = []
    if job.world.rank == 0:
        alone = Runtime(Group(), Group())
        make(config(together / "run", "--run.steps", "2", *words), alone).train()
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
