"""The run directory keeps the reason why a start has failed."""

from __future__ import annotations

import logging
import shutil

import pytest

from hpc_train.config import RunConfig
from hpc_train.config.file import load
from hpc_train.errors import ConfigError, Stopped
from hpc_train.files import lines_of
from hpc_train.job.run_directory import keep_lost_records, run_directory, write_config
from hpc_train.launch.alive import state_in_words
from hpc_train.mpi.group import Group


def configured(directory) -> RunConfig:
    return load(options=["--run.dir", str(directory)])


def last_line(directory, rank=0) -> str:
    log = directory / f"logs/rank-{rank:03d}.log"
    return log.read_text(encoding="utf-8").splitlines()[-1]


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_the_reason_of_a_start_that_is_refused_is_in_its_log_and_its_events(group, together):
    with pytest.raises(ConfigError), run_directory(group, configured(together)):
        raise ConfigError("run.x is 1", "give 2")
    assert last_line(together, group.rank).endswith("ERROR run.x is 1: give 2")
    group.barrier()
    assert state_in_words(together) == "failed: run.x is 1"


def test_what_was_reported_is_not_recorded_twice(tmp_path):
    with pytest.raises(ConfigError), run_directory(Group(), configured(tmp_path)) as (folder, _):
        (folder / "events.jsonl").write_text('{"event": "end", "reason": "failed", "step": 3}\n')
        raise ConfigError("a rank has failed")
    with pytest.raises(Stopped), run_directory(Group(), configured(tmp_path)):
        raise Stopped(3, "SIGTERM")
    assert len([*lines_of(tmp_path / "events.jsonl")]) == 1


def test_nothing_is_recorded_in_the_directory_of_another_job(tmp_path):
    with pytest.raises(ConfigError), run_directory(Group(), configured(tmp_path)) as (_, claim):
        shutil.rmtree(claim.folder)  # as a user frees it for another job
        raise ConfigError("run.x is 1")
    assert not (tmp_path / "events.jsonl").exists()


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_a_run_is_not_put_into_the_folder_of_a_data_set(group, together):
    if group.rank == 0:
        (together / "manifest.json").write_text('{\n "format": "hpc_train.table/5",\n "rows": 1}')
    refused = pytest.raises(ConfigError, match="is the folder of a data set: give the run")
    with refused, run_directory(group, configured(together)):
        pass


def test_changes_of_the_training_are_told_at_a_resume(tmp_path, caplog):
    def start(*options):
        caplog.clear()
        given = load(options=["--run.dir", str(tmp_path), *options])
        write_config(Group(), tmp_path, given)
        return [record.message for record in caplog.records]

    caplog.set_level(logging.INFO, "hpc_train")
    cosine = ["--optimizer.schedule", "cosine"]
    assert start() == []
    assert start("--run.steps", "7", "--run.log_every", "3") == [], "the learning rate is the same"
    assert start("--run.steps", "7", *cosine) == [
        "changed since the last start: optimizer.schedule constant -> cosine"
    ]
    assert start("--run.steps", "9", "--optimizer.lr", "0.5", *cosine) == [
        "changed since the last start: run.steps 7 -> 9, optimizer.lr 0.0003 -> 0.5"
    ]
    (tmp_path / "config.yaml").write_text("[")
    assert start() == []


def test_the_records_of_a_run_whose_checkpoints_are_all_gone_are_kept(tmp_path, caplog):
    records = tmp_path / "metrics.jsonl"
    records.write_text('{"step": 8, "loss": 1.5}\n{"step": 9, "loss": 1.0}\n', encoding="utf-8")
    keep_lost_records(Group(), tmp_path, after=9)
    assert [*tmp_path.iterdir()] == [records]
    keep_lost_records(Group(), tmp_path, after=0)
    (kept,) = tmp_path.glob("metrics-before-*.jsonl")
    assert [line["step"] for line in lines_of(kept)] == [8, 9]
    assert "end at step 9, but there is no checkpoint: training begins again at" in caplog.text
