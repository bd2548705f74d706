"""Writes a run to MLflow's store of files. Only looking at it takes the package mlflow.

The package itself is not loaded in a job, because its import starts a process and its first run
asks a server on the internet. The store has a folder for each experiment and in it one for each
run, with meta.yaml, a file for each tag and parameter, and for each metric a file of lines:
milliseconds, value, step.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from hpc_train import files
from hpc_train.trackers.source import TrackedRun, numbers_of

RUNNING, SCHEDULED, FINISHED, FAILED = 1, 2, 3, 4  # as MLflow numbers them
STATES = {"finished": FINISHED, "failed": FAILED, "stopped": SCHEDULED}
JOB = 4  # MLflow's number of this kind of source
LONGEST_PARAMETER = 6000  # characters that MLflow takes
_META = "meta.yaml"  # says what a folder of the store is
OWN_STORE = "mlruns"  # in the folder of a run
TRASH = ".trash"  # in a store: the folder of deleted experiments
MARK = "hpc_train.mark"  # the tag that keeps the mark


def local_store(run: TrackedRun) -> Path | None:
    """The folder of the store; None if MLFLOW_TRACKING_URI names one that is no folder."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        return run.folder / OWN_STORE
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(uri) if not parts.scheme and "://" not in uri and uri != "databricks" else None


def experiment() -> str:
    """The name of the experiment."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "hpc_train"


def parameters(run: TrackedRun) -> dict[str, str]:
    """The parameters of a run, in the length that MLflow takes."""
    return {key: value[:LONGEST_PARAMETER] for key, value in run.values().items()}


def tags(run: TrackedRun) -> dict[str, str]:
    """The tags that MLflow itself gives to runs."""
    commit = run.values().get("start.commit")
    named_commit = {"mlflow.source.git.commit": commit} if commit else {}
    return {"mlflow.runName": run.name, "mlflow.source.type": "JOB"} | named_commit


class MLflowFiles:
    """Writes a run to a store of files; each start continues the same run of MLflow.

    Args:
        run: the run.
        store: the folder of the store.
    """

    def __init__(self, run: TrackedRun, store: Path) -> None:
        self.run = run
        self.store = store.resolve()
        self.experiment_id = _id_of(experiment(), self.store)
        self.directory = _directory_of(run, self.store, self.store / self.experiment_id)
        self.run_id = self.directory.name
        self._lines: dict[str, list[str]] = {}
        self._began = int(time.time() * 1000)

    def read_mark(self) -> dict[str, Any]:
        """The mark that was written last; an empty one if the run is not in the store."""
        try:
            return files.parsed_object((self.directory / "tags" / MARK).read_bytes()) or {}
        except FileNotFoundError:
            return {}

    def begin(self, after: int) -> int:
        """Make the run if it is not there, and drop later steps. Returns the step."""
        for folder in ("metrics", "params", "tags", "artifacts"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        meta = self.store / self.experiment_id / _META
        if not meta.exists():
            now = int(time.time() * 1000)
            about: dict[str, Any] = {
                "artifact_location": meta.parent.as_uri(),
                "name": experiment(),
            }
            about |= {"experiment_id": self.experiment_id, "lifecycle_stage": "active"}
            _write(meta, about | {"creation_time": now, "last_update_time": now})
        if starts := self.run.starts():
            self._began = int(starts[0]["time"] * 1000)
        for path in (self.directory / "metrics").rglob("*"):
            if path.is_file():
                _drop_later(path, after)
        for folder, texts in (("params", parameters(self.run)), ("tags", tags(self.run))):
            for key, text in texts.items():
                (self.directory / folder / key).write_text(text, encoding="utf-8")
        config = self.directory / "artifacts" / "config.yaml"
        config.write_text(self.run.config_text, encoding="utf-8")
        self._write_meta(RUNNING, None)
        return after

    def _write_meta(self, status: int, ended: int | None) -> None:
        about: dict[str, Any] = {
            "artifact_uri": (self.directory / "artifacts").as_uri(),
            "end_time": None if status in (RUNNING, SCHEDULED) else ended,
            "entry_point_name": "",
            "experiment_id": self.experiment_id,
            "lifecycle_stage": "active",
            "run_id": self.run_id,
            "run_name": self.run.name,
            "run_uuid": self.run_id,
            "source_name": "",
            "source_type": JOB,
            "source_version": "",
            "start_time": self._began,
            "status": status,
            "tags": [],
            "user_id": os.environ.get("USER", ""),
        }
        _write(self.directory / _META, about)

    def log(self, record: dict[str, Any]) -> None:
        """Take a record."""
        when = int(record["time"] * 1000)
        for name, value in numbers_of(record).items():
            self._lines.setdefault(name, []).append(f"{when} {value!r} {record['step']}\n")

    def write_mark(self, mark: dict[str, Any]) -> None:
        """Write the metrics that are left, and then the mark."""
        for name, lines in self._lines.items():
            path = self.directory / "metrics" / name
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        self._lines.clear()
        files.write_text(self.directory / "tags" / MARK, json.dumps(mark))

    def end_pass(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Say how the run has ended, if it has."""
        if self.directory.exists():
            state, ended = self.run.ending()
            self._write_meta(STATES.get(state, RUNNING), ended)


def _directory_of(run: TrackedRun, store: Path, of_experiment: Path) -> Path:
    """The run's folder. Its name is made of the run directory's path.

    A run directory's own store may have moved with it; then the run is the one that is there.
    """
    made = of_experiment / uuid.uuid5(uuid.NAMESPACE_URL, run.path.resolve().as_uri()).hex
    own = store == (run.folder / OWN_STORE).resolve()
    if own and not made.exists():
        marks = sorted(of_experiment.glob(f"*/tags/{MARK}"), key=lambda mark: mark.stat().st_mtime)
        return marks[-1].parent.parent if marks else made
    return made


def _id_of(name: str, store: Path) -> str:
    """The id of an experiment: that which the store has, or else the same for each writer.

    So no two writers make it twice.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    number = int.from_bytes(digest) + 10**17  # 18 digits, as MLflow makes them
    while (store / TRASH / str(number)).exists():  # deleted in MLflow: it may be restored
        number += 1
    own = str(number)
    if (store / own / _META).exists():
        return own
    there = (path.parent.name for path in sorted(store.glob(f"*/{_META}")) if _is_of(path, name))
    return next(there, own)


def _is_of(path: Path, name: str) -> bool:
    """Whether a file is about the active experiment of a name."""
    with suppress(OSError, ValueError, yaml.YAMLError, AttributeError):
        about = yaml.safe_load(path.read_text(encoding="utf-8"))
        return bool(about.get("name") == name and about.get("lifecycle_stage") == "active")
    return False


def _write(path: Path, about: dict[str, Any]) -> None:
    files.write_text(path, yaml.safe_dump(about))


def _drop_later(path: Path, after: int) -> None:
    """Drop the lines of later steps, and one that a killed job did not finish."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and int(line.split()[2]) <= after]
    if not kept:
        path.unlink()  # MLflow refuses an empty file
    elif len(kept) < len(lines):
        files.write_text(path, "".join(kept))
