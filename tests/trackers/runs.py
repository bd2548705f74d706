"""Runs as jobs leave them, and what other libraries read of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hpc_train.monitoring.records import RecordsFile

READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
experiments = client.search_experiments(filter_string="name = 'hpc_train'")
runs = client.search_runs([one.experiment_id for one in experiments])
print(json.dumps([
    {
        "name": run.info.run_name, "status": run.info.status, "parameters": run.data.params,
        "ended": run.info.end_time,
        "tags": run.data.tags,
        "metrics": {
            name: [[one.step, one.value, one.timestamp]
                   for one in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        },
    }
    for run in runs
]))
"""


class MadeRun:
    """A run directory that jobs have written to.

    Each job computes other losses, so that its records can be told from those of an earlier one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs = 0
        path.mkdir()
        (path / "config.yaml").write_text("run:\n  steps: 40\noptimizer:\n  lr: 0.5\n")

    def job(self, after: int, last: int, *, ends: bool = False) -> None:
        """Let a job resume after a step, and log each step up to the last one."""
        self.jobs += 1
        metrics = RecordsFile(self.path / "metrics.jsonl", after)
        events = RecordsFile(self.path / "events.jsonl")
        start = {"time": 1000.0 * self.jobs, "event": "start", "step": after, "after": after}
        events.write(start | {"version": "0", "device": "cpu", "commit": "c0ffee"})
        for step in range(after + 1, last + 1):
            metrics.write(self.record(step))
        if ends:
            ended = {"time": 1000.0 * self.jobs + last, "event": "end", "step": last}
            events.write(ended | {"reason": "finished"})
        metrics.close()
        events.close()

    def record(self, step: int) -> dict:
        """The record of a step in the newest job."""
        loss = self.jobs + step / 64
        made = {"step": step, "loss": loss, "data_seconds": 0.25, "time": self.jobs * 1000.0 + step}
        return made | ({"validation_auc": 0.5} if step % 4 == 0 else {})


def losses(run: Path) -> dict[int, float]:
    """The loss of each step in metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def of_tensorboard(folder: Path) -> tuple[dict[str, list], str]:
    """The scalars that TensorBoard reads, as (step, value, time) by tag, and the text."""
    from tensorboard.backend.event_processing import event_accumulator

    found = event_accumulator.EventAccumulator(str(folder), {"tensors": 0, "scalars": 0})
    found.Reload()
    scalars = {
        tag: [(one.step, one.value, one.wall_time) for one in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
    return scalars, found.Tensors("config")[-1].tensor_proto.string_val[0].decode()


def of_mlflow(store: Path) -> list[dict]:
    """The runs that MLflow reads. It starts processes and threads, so another process reads."""
    environ = os.environ | {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    words = [sys.executable, "-W", "ignore", "-c", READ_MLFLOW, store.resolve().as_uri()]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def steps_and_losses(series: list) -> dict[int, float]:
    """The value of each step of a series, which has each step once."""
    found = {one[0]: one[1] for one in series}
    assert len(found) == len(series)
    return found
