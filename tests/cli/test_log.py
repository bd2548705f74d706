"""`hpc-train log export` as it is called on a login node."""

from __future__ import annotations

import json
import sys

import pytest

from tests.programs import hpc_train, only_line, run
from tests.trackers.runs import MadeRun, losses

# Stands in for the package wandb, which starts a program of 30 MB: notes what it is told.
WANDB = """
import json, os
class Settings(dict):
    def __init__(self, **given): super().__init__(given)
class Run:
    def __init__(self, about): self.about, self.records = about, []
    def log(self, values, step): self.records.append([step, values])
    def finish(self):
        folder = os.path.join(self.about["dir"], "wandb", "offline-run-x-" + self.about["id"])
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "calls"), "a") as file:
            file.write(json.dumps([self.about, self.records]) + chr(10))
def init(**about): return Run(about)
"""
WITHOUT = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "wandb" else find(name, *rest)
"""


def export(made: MadeRun, *words: str, path="", **environ: str):
    environ["PYTHONPATH"] = path
    return run(*hpc_train("log", "export", str(made.path), *words), environ=environ)


OWN = """
class Lines:
    def __init__(self, directory, config, after): self.file = (directory / "lines").open("a")
    def log(self, record): self.file.write(str(record["step"]))
    def close(self): self.file.close()
"""


@pytest.fixture
def made(tmp_path):
    return MadeRun(tmp_path / "run")


def test_wandb_gets_what_is_new_and_another_run_after_a_resume(made, tmp_path, monkeypatch):
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "wandb.py").write_text(WANDB)
    path = ":".join([str(tmp_path / "stand-in"), *sys.path])
    ids = []
    for after, last, new in ((0, 5, 5), (5, 7, 2), (6, 9, 9)):
        made.job(after, last)
        done = export(made, "--to", "wandb", path=path)
        assert f"{new} records written to wandb" in done.stdout, done.stderr
        (folder,) = (made.path / "wandb").glob("offline-run-*")
        calls = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
        ids.append(calls[-1][0]["id"])
    assert "0 records written" in export(made, "--to", "wandb", path=path).stdout
    assert ids[0] == ids[1] != ids[2]
    (about, records) = calls[0]
    assert (about["mode"], about["name"]) == ("offline", "run")
    assert about["config"]["optimizer.lr"] == "0.5"
    assert {step: values["train/loss"] for step, values in records} == losses(made.path)
    assert records[0][1]["_timestamp"] == 1001.0


def test_a_missing_library_is_one_line(made, tmp_path):
    made.job(0, 1)
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT)
    done = export(made, "--to", "wandb", path=":".join([str(tmp_path / "without"), *sys.path]))
    assert done.returncode == 2
    assert only_line(done.stderr).endswith("which is not here: pip install wandb")


def test_several_runs_go_to_one_folder(made, tmp_path):
    other = MadeRun(tmp_path / "other")
    made.job(0, 2)
    other.job(0, 3)
    done = export(made, str(other.path), "--to", "tensorboard", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    for name in ("run", "other"):
        assert list((tmp_path / "out" / name / "tensorboard").glob("events.out.tfevents.*"))
    assert not (made.path / "tensorboard").exists()


@pytest.mark.parametrize("tracker", ["csv", "tensorboard"])
def test_another_run_of_the_same_name_does_not_replace_an_export(made, tmp_path, tracker):
    (tmp_path / "b").mkdir()
    other, out = MadeRun(tmp_path / "b/run"), tmp_path / "out"
    made.job(0, 2)
    other.job(0, 3)
    for _ in range(2):
        done = export(made, "--to", tracker, "--out", str(out))
        assert done.returncode == 0, done.stderr
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = export(other, "--to", tracker, "--out", str(out))
    assert done.returncode == 2
    line = only_line(done.stderr)
    assert f"{out}/run has the export of another run, {made.path}: give another --out, or" in line
    assert {path: path.read_bytes() for path in before} == before
    (out / "run/.trackers/run").unlink()
    assert export(other, "--to", tracker, "--out", str(out)).returncode == 0


def test_a_class_of_the_user_writes_to_the_folder_of_the_export(made, tmp_path):
    made.job(0, 2)
    (tmp_path / "mine.py").write_text(OWN)
    path = ":".join([str(tmp_path), *sys.path])
    done = export(made, "--to", "mine:Lines", "--out", str(tmp_path / "out"), path=path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/run/lines").read_text() == "12"
    assert not (made.path / "lines").exists()


def test_runs_without_records_are_left_out_and_told(made, tmp_path):
    made.job(0, 2)
    (tmp_path / "queued").mkdir()
    done = export(made, str(tmp_path / "queued"), "--to", "csv")
    assert (done.returncode, (made.path / "metrics.csv").exists()) == (0, True)
    told = f"hpc-train log: {tmp_path}/queued has no records yet: it is left out"
    assert done.stderr.splitlines() == [told]
    (made.path / "metrics.jsonl").unlink()
    done = export(made, str(tmp_path / "queued"), "--to", "csv")
    assert done.returncode == 2
    assert "has no metrics.jsonl" in only_line(done.stderr)


def test_no_torch_and_no_mpi_are_loaded(made):
    made.job(0, 2)
    words = [sys.executable, "-X", "importtime", "-m", "hpc_train", "log", "export"]
    for tracker in ("tensorboard", "mlflow", "csv"):
        done = run(*words, str(made.path), "--to", tracker)
        assert done.returncode == 0, done.stderr
        loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
        assert loaded & {"torch", "mpi4py", "numpy", "mlflow", "tensorboard"} == set()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--to", "neptune"], "is none of tensorboard, mlflow, wandb, csv"),
        (["--to", "no.module:Class"], "cannot be imported (ModuleNotFoundError"),
        (["--to", "json:JSONDecoder"], "which has no method log"),
        (["nowhere", "--to", "csv"], "nowhere has no metrics.jsonl: give the directory of a run"),
        (["--to", "csv", "--out", "/proc/1/no"], "/proc/1/no cannot be used (No such file"),
    ],
)
def test_mistakes_are_one_line(made, words, line):
    made.job(0, 1)
    done = export(made, *words, path=":".join(sys.path))
    assert done.returncode == 2, done.stderr
    assert line in only_line(done.stderr)


@pytest.mark.parametrize("step", ["six", None, 2.5])
def test_a_record_whose_step_is_no_integer_is_named_by_file_and_line(made, step):
    made.job(0, 5)
    with (made.path / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": step, "loss": 1.0}) + "\n")
    done = export(made, "--to", "csv")
    assert done.returncode == 2
    assert f"metrics.jsonl, line 7: the step of the record is {step!r}" in only_line(done.stderr)


def test_a_record_without_time_is_named_by_file_and_line(made):
    made.job(0, 5)
    with (made.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "loss": 1.0}) + "\n")
    done = export(made, "--to", "tensorboard")
    assert done.returncode == 2
    assert "metrics.jsonl, line 6: the time of the record is None" in only_line(done.stderr)


@pytest.mark.parametrize("text", ["a: [", "- 1", "\x01"])
def test_a_damaged_configuration_is_one_line(made, text):
    made.job(0, 1)
    (made.path / "config.yaml").write_text(text)
    done = export(made, "--to", "tensorboard")
    assert done.returncode == 2
    assert "config.yaml is not a configuration: correct or remove it" in only_line(done.stderr)


def test_a_database_of_mlflow_needs_a_library_that_is_named(made, tmp_path):
    pytest.importorskip("mlflow", reason="the package mlflow-skinny is not installed")
    made.job(0, 1)
    (tmp_path / "without").mkdir()
    hidden = WITHOUT.replace("wandb", "sqlalchemy")
    (tmp_path / "without" / "sitecustomize.py").write_text(hidden)
    path = ":".join([str(tmp_path / "without"), *sys.path])
    database = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db"}
    done = export(made, "--to", "mlflow", path=path, **database)
    assert done.returncode == 2
    line = only_line(done.stderr)
    assert "the export to mlflow needs the Python package sqlalchemy, which is not here" in line
