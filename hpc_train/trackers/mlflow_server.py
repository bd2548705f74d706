"""Exports a run to a store of MLflow that is no folder: a database, or a server."""

from __future__ import annotations

import json
import os
from typing import Any

# Otherwise the package asks a server of its makers when it is used.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# With its own 7 it says only after four minutes that no server answers.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from hpc_train.trackers.mlflow_files import MARK, experiment, parameters, tags
from hpc_train.trackers.source import TrackedRun, numbers_of

METRICS_AT_ONCE, PARAMETERS_AT_ONCE = 1000, 100  # as many as MLflow takes
RUN_TAG = "hpc_train.run"  # the tag with the run directory
NAMES_OF_STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "SCHEDULED"}


class MLflowServer:
    """Exports a run to where MLFLOW_TRACKING_URI points.

    MLflow deletes no metrics of a run. Where later steps must go, a new run takes the place of the
    one that has them.

    Args:
        run: the run.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.client = MlflowClient()
        self.run_id = ""
        self._metrics: list[Metric] = []
        found = self.client.get_experiment_by_name(experiment())
        self.experiment_id = (
            found.experiment_id if found else self.client.create_experiment(experiment())
        )

    def read_mark(self) -> dict[str, Any]:
        """The mark that was written last; an empty one if the run is not there."""
        path = str(self.run.path.resolve())
        quote = '"' if "'" in path else "'"  # a quote within quotes cannot be written in a filter
        filter_ = f"tags.`{RUN_TAG}` = {quote}{path}{quote}"
        found = self.client.search_runs([self.experiment_id], filter_)
        if not found:
            return {}
        self.run_id = found[0].info.run_id
        mark: dict[str, Any] = json.loads(found[0].data.tags.get(MARK, "{}"))
        return mark

    def begin(self, after: int) -> int:
        """Continue the run, or replace it if it has later steps. Returns the step it has."""
        if self.run_id and not self._has_later(after):
            self.client.update_run(self.run_id, "RUNNING")
            return after
        if self.run_id:
            self.client.delete_run(self.run_id)
        starts = self.run.starts()
        began = int(starts[0]["time"] * 1000) if starts else None
        about = tags(self.run) | {RUN_TAG: str(self.run.path.resolve())}
        made = self.client.create_run(self.experiment_id, began, about, self.run.name)
        self.run_id = made.info.run_id
        every = [Param(key, value) for key, value in parameters(self.run).items()]
        for first in range(0, len(every), PARAMETERS_AT_ONCE):
            self.client.log_batch(self.run_id, params=every[first : first + PARAMETERS_AT_ONCE])
        return 0

    def _has_later(self, after: int) -> bool:
        metrics = self.client.get_run(self.run_id).data.metrics
        return any(
            metric.step > after
            for name in metrics
            for metric in self.client.get_metric_history(self.run_id, name)
        )

    def log(self, record: dict[str, Any]) -> None:
        """Take a record."""
        when = int(record["time"] * 1000)
        self._metrics += [
            Metric(name, value, when, record["step"]) for name, value in numbers_of(record).items()
        ]

    def write_mark(self, mark: dict[str, Any]) -> None:
        """Send the metrics that are left, and then the mark."""
        while self._metrics:
            self.client.log_batch(self.run_id, metrics=self._metrics[:METRICS_AT_ONCE])
            del self._metrics[:METRICS_AT_ONCE]
        self.client.log_batch(self.run_id, tags=[RunTag(MARK, json.dumps(mark))])

    def end_pass(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Say how the run has ended, if it has."""
        state, ended = self.run.ending()
        if self.run_id and state in NAMES_OF_STATES:
            self.client.set_terminated(self.run_id, NAMES_OF_STATES[state], ended)
