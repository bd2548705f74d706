"""Chooses the tracker of a name, and refuses one that cannot work here."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train.errors import ConfigError, SetupError
from hpc_train.trackers import Tracker
from hpc_train.trackers.csv_file import CsvFile
from hpc_train.trackers.feed import MarkFile, Sink
from hpc_train.trackers.mlflow_files import MLflowFiles, local_store
from hpc_train.trackers.source import TrackedRun
from hpc_train.trackers.tensorboard import TensorBoardFiles

EXPORTS = ("tensorboard", "mlflow", "wandb", "csv")
INSTALLS = {"mlflow": "mlflow-skinny sqlalchemy alembic", "wandb": "wandb"}
"""What pip installs for the exports that need a library."""
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # in which MLflow keeps runs


class _OwnTracker(MarkFile):
    """A class of the user."""

    def __init__(self, run: TrackedRun, name: str, made: type[Tracker]) -> None:
        super().__init__(run.folder / ".trackers" / f"{name}.json")
        self.run, self.made = run, made
        self.tracker: Tracker | None = None

    def begin(self, after: int) -> int:
        config: Mapping[str, Any] = self.run.config
        self.tracker = self.made(self.run.folder, config, after)
        return after

    def log(self, record: dict[str, Any]) -> None:
        assert self.tracker is not None
        self.tracker.log(record)

    def close(self) -> None:
        if self.tracker is not None:
            self.tracker.close()


def check_tracker(name: str) -> None:
    """Check that a job can log to a tracker.

    Raises:
        ConfigError: it cannot; the message says what can.
    """
    if name == "mlflow" and local_store(TrackedRun(Path(), Path())) is None:
        raise ConfigError(
            "run.trackers names mlflow, but MLFLOW_TRACKING_URI is "
            f"{os.environ['MLFLOW_TRACKING_URI']!r}, and a job writes to files only",
            "give it a folder, or leave mlflow out and run `hpc-train log export RUN --to mlflow`",
        )
    if ":" in name:
        _own_class(name, "run.trackers")


def make_sink(run: TrackedRun, name: str, *, exports: bool = False) -> Sink:
    """Make the sink of a tracker.

    Args:
        run: the run.
        name: one of EXPORTS, or package.module:Class.
        exports: whether this is an export, which may start processes and use the network.

    Raises:
        ConfigError: there is no such class.
        SetupError: the library for the export is missing.
    """
    if ":" in name:
        return _OwnTracker(run, name, _own_class(name, "--to" if exports else "run.trackers"))
    if name == "tensorboard":
        return TensorBoardFiles(run)
    if name == "csv":
        return CsvFile(run)
    if name == "mlflow" and (store := local_store(run)) is not None:
        return MLflowFiles(run, store)
    assert exports
    in_database = os.environ.get("MLFLOW_TRACKING_URI", "").startswith(DATABASES)
    more = ["sqlalchemy", "alembic"] if name == "mlflow" and in_database else []
    for package in (name, *more):
        _need(package, name)
    if name == "mlflow":
        from hpc_train.trackers.mlflow_server import MLflowServer

        return MLflowServer(run)
    from hpc_train.trackers.wandb_runs import WandbRuns

    return WandbRuns(run)


def _need(package: str, tracker: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SetupError(
            f"the export to {tracker} needs the Python package {package}, which is not here",
            f"pip install {INSTALLS[tracker]}",
        )


def _own_class(name: str, key: str) -> type[Tracker]:
    module, _, path = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), path)
    except Exception as error:  # noqa: BLE001  # whatever the user's module raises
        raise ConfigError(
            f"{key} names {name}, which cannot be imported ({type(error).__name__}: {error})",
            "write package.module:Class, and put the module's folder into PYTHONPATH",
        ) from None
    for method in ("log", "close"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(
                f"{key} names {name}, which has no method {method}",
                "docs/how-to/trackers.md says what a tracker needs",
            )
    return made  # type: ignore[no-any-return]
