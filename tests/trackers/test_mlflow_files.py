"""The store of files, read by MLflow itself."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from hpc_train.cli.log import export_run
from hpc_train.trackers.mlflow_files import local_store
from hpc_train.trackers.source import TrackedRun
from tests.trackers.runs import MadeRun, losses, of_mlflow, steps_and_losses


def test_mlflow_reads_one_run_with_each_step_once(tmp_path):
    pytest.importorskip("mlflow", reason="the package mlflow-skinny is not installed")
    run, other = MadeRun(tmp_path / "run"), MadeRun(tmp_path / "other")
    store = tmp_path / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", str(store))
        for after, last in ((0, 9), (3, 7), (6, 12)):
            run.job(after, last, ends=last == 12)
            export_run(TrackedRun(run.path, run.path), "mlflow")
        other.job(0, 2)
        export_run(TrackedRun(other.path, other.path), "mlflow")
    found = {one["name"]: one for one in of_mlflow(store)}
    assert set(found) == {"run", "other"}
    one = found["run"]
    assert steps_and_losses(one["metrics"]["train/loss"]) == losses(run.path)
    assert one["metrics"]["validation/auc"] == [[4, 0.5, 2004000], [8, 0.5, 3008000],
                                                [12, 0.5, 3012000]]  # fmt: skip
    assert (one["status"], one["ended"]) == ("FINISHED", 3012000)
    assert one["parameters"]["optimizer.lr"] == "0.5"
    assert one["tags"]["mlflow.source.git.commit"] == "c0ffee"
    assert (found["other"]["status"], found["other"]["ended"]) == ("RUNNING", None)


def test_an_experiment_of_the_name_that_is_in_the_store_gets_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    others = {"1": "hpc_train", "2": "other", "3": "hpc_train"}
    for number, name in others.items():
        stage = "deleted" if number == "1" else "active"
        path = tmp_path / f"store/{number}/meta.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"{{name: {name}, lifecycle_stage: {stage}}}")
    run = MadeRun(tmp_path / "run")
    run.job(0, 2)
    export_run(TrackedRun(run.path, run.path), "mlflow")
    (made,) = (tmp_path / "store").glob("*/*/meta.yaml")
    assert made.parent.parent.name == "3"


def test_a_run_that_was_moved_with_its_store_stays_the_same_run(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = MadeRun(tmp_path / "run")
    for folder, last in (("run", 2), ("moved", 4)):
        run.path.rename(tmp_path / folder)
        run.path = tmp_path / folder
        run.job(last - 2, last)
        export_run(TrackedRun(run.path, run.path), "mlflow")
    (losses_,) = run.path.glob("mlruns/*/*/metrics/train/loss")
    assert len(losses_.read_text().splitlines()) == 4


def test_an_experiment_that_was_deleted_is_not_made_again_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    run, store = MadeRun(tmp_path / "run"), tmp_path / "store"
    run.job(0, 2)
    export_run(TrackedRun(run.path, run.path), "mlflow")
    (first,) = store.glob("[0-9]*")
    (store / ".trash").mkdir()
    first.rename(store / ".trash" / first.name)  # as MLflow does it
    for _ in range(2):
        export_run(TrackedRun(run.path, run.path), "mlflow")
    (second,) = store.glob("[0-9]*")
    assert second.name != first.name


def test_a_configuration_is_read_as_utf_8_in_any_locale(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "latin-1")
    run = MadeRun(tmp_path / "run")
    (run.path / "config.yaml").write_bytes("data: {path: /data/süß}".encode())
    run.job(0, 2)
    for tracker in ("mlflow", "csv"):
        export_run(TrackedRun(run.path, run.path), tracker)
    (path,) = run.path.glob("mlruns/*/*/params/data.path")
    assert path.read_bytes().decode() == "/data/süß"


EXPORTS_BY_CLIENT = """
import sys
from pathlib import Path
from hpc_train.trackers.feed import Feed
from hpc_train.trackers.mlflow_server import MLflowServer
from hpc_train.trackers.source import TrackedRun
from tests.trackers.runs import MadeRun
made = MadeRun(Path(sys.argv[1]))
for after, last in ((0, 9), (9, 11), (5, 7)):
    made.job(after, last, ends=last == 7)
    run = TrackedRun(made.path, made.path)
    feed = Feed(run, "mlflow", MLflowServer(run))
    print(feed.pass_on())
    feed.close()
"""


def test_an_export_through_the_client_replaces_steps_that_were_computed_again(tmp_path):
    pytest.importorskip("mlflow", reason="the package mlflow-skinny is not installed")
    path = tmp_path / "it's a run"
    environ = os.environ | {"MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri()}
    environ |= {"MLFLOW_ALLOW_FILE_STORE": "true"}
    words = [sys.executable, "-W", "ignore", "-c", EXPORTS_BY_CLIENT, str(path)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["9", "2", "7"]
    (one,) = of_mlflow(tmp_path / "store")
    assert steps_and_losses(one["metrics"]["train/loss"]) == losses(path)
    assert one["parameters"]["run.steps"] == "40"
    assert (one["status"], one["ended"]) == ("FINISHED", 3007000)


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("", "run/mlruns"),
        ("file:///a/b%20c", "/a/b c"),
        ("/a/b", "/a/b"),
        ("sqlite:///a.db", None),
        ("https://host:5000", None),
        ("databricks", None),
    ],
)
def test_the_store_is_a_folder_if_the_address_is_one(tmp_path, monkeypatch, uri, folder):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    found = local_store(TrackedRun(tmp_path / "run", tmp_path / "run"))
    assert found == (None if folder is None else tmp_path / folder)
