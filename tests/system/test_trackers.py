"""Trackers of whole jobs: what they show after a kill, and that they start no process."""

from __future__ import annotations

import csv
import os
import sys
from importlib.util import find_spec

import pytest

from tests.programs import only_line
from tests.trackers.runs import losses, of_mlflow, of_tensorboard, steps_and_losses

# Kills rank 0 at step 8 of the first job, and notes the processes that rank 0 starts meanwhile.
OWN = """
import os, signal, sys
from pathlib import Path
from hpc_train.trackers import thread
thread.ROUND_SECONDS = 0.0  # so that the first job is still at work
STARTS = {"os.fork", "os.forkpty", "subprocess.Popen", "os.posix_spawn", "os.system"}
class Kills:
    def __init__(self, directory, config, after):
        self.out = Path(directory) / "own.txt"
        self.note(f"after {after}")
        sys.addaudithook(lambda event, _: event in STARTS and self.note(f"started {event}"))
    def note(self, text):
        with self.out.open("a") as file:
            file.write(text + chr(10))
    def log(self, record):
        if record["step"] == 8 and "after 0" == self.out.read_text().strip():
            os.kill(os.getpid(), signal.SIGKILL)
    def close(self):
        self.note("closed")
"""


@pytest.mark.slow("two jobs, and MLflow's own reader")
def test_a_killed_job_resumes_and_nothing_is_doubled(program):
    folder = program.root / "own"
    folder.mkdir()
    (folder / "own_tracker.py").write_text(OWN)
    environ = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    options = ["--run.trackers", "[tensorboard, mlflow, csv, own_tracker:Kills]"]
    options += ["--data.validation_every", "4", "--data.validation_batches", "1"]
    options += ["--run.steps", "20"]
    how = {"launcher": "mpirun", "ranks": 2, "environ": environ}
    assert program.train("run", *options, **how).returncode not in (0, 2, 75)
    done = program.train("run", *options, **how)
    assert done.returncode == 0, done.stderr
    directory = program.root / "run"
    expected = losses(directory)
    assert [*expected] == [*range(1, 21)]
    # The second job resumed after step 5.
    notes = (directory / "own.txt").read_text().splitlines()
    assert len(notes) == 3
    assert int(notes[1].removeprefix("after ")) <= 5
    with (directory / "metrics.csv").open() as file:
        assert {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)} == expected
    if find_spec("mlflow"):
        (one,) = of_mlflow(directory / "mlruns")
        assert steps_and_losses(one["metrics"]["train/loss"]) == expected
        assert [found[0] for found in one["metrics"]["validation/loss"]] == [*range(4, 21, 4)]
        assert one["status"] == "FINISHED"
        assert one["parameters"]["model.hidden"] == "32"
    if find_spec("tensorboard"):
        scalars, text = of_tensorboard(directory / "tensorboard")
        rounded = pytest.approx(expected, rel=1e-6)  # of float32
        assert steps_and_losses(scalars["train/loss"]) == rounded
        assert "| run.steps | 20 |" in text


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("[wandb]", "`hpc-train log export RUN --to wandb` on a login node"),
        ("[tensorbord]", "it takes tensorboard, mlflow, csv and package.module:Class"),
        ("[csv, csv]", "run.trackers names csv twice: name it once"),
        ("[no_such_module:Class]", "cannot be imported (ModuleNotFoundError: No module named"),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_before_training(program, value, line):
    ranks = {"launcher": "mpirun", "ranks": 2} if "no_such" in value else {}
    done = program.train("run", "--run.trackers", value, **ranks)
    assert done.returncode == 2, done.stderr
    assert line in only_line(done.stdout + done.stderr)
    assert not list((program.root / "run" / "checkpoints").glob("step*"))
