"""What trackers are told about a run: all of it is in files of the run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from hpc_train.errors import DataError
from hpc_train.files import lines_of

_GROUPS = {"epoch": "train", "loss": "train", "lr": "train", "grad_norm": "train"}
_ENDINGS = {"_seconds": "time", "_per_second": "speed", "flops": "speed", "mfu": "speed"}


@dataclass(frozen=True)
class TrackedRun:
    """A run, and where its trackers write.

    Args:
        path: the run directory.
        folder: the folder that trackers write to: the run directory, or one of an export.
    """

    path: Path
    folder: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.resolve().name

    @cached_property
    def config_text(self) -> str:
        """The configuration as YAML; "" if there is none."""
        try:
            return (self.path / "config.yaml").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, by section and key.

        Raises:
            DataError: it is no YAML, or has no keys.
        """
        try:
            found = yaml.safe_load(self.config_text) or {}
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise DataError(
                f"{self.path / 'config.yaml'} is not a configuration", "correct or remove it"
            )
        return found

    def values(self) -> dict[str, str]:
        """The values of all keys of the configuration as text, and what the last start says."""
        found = {
            f"{section}.{key}": str(value)
            for section, values in self.config.items()
            for key, value in (values.items() if isinstance(values, dict) else ())
        }
        starts = self.starts()
        for key in ("version", "device", "commit"):
            if starts and starts[-1].get(key):
                found[f"start.{key}"] = str(starts[-1][key])
        return found

    def starts(self) -> list[dict[str, Any]]:
        """The events "start" of the run that say when and after which step, in their order."""
        starts = (event for event in self._events() if event.get("event") == "start")
        return [
            start
            for start in starts
            if isinstance(start.get("time"), int | float) and isinstance(start.get("after"), int)
        ]

    def ending(self) -> tuple[str, int | None]:
        """How the newest job of the run has ended, and when, in milliseconds since 1970.

        The first is "running" if it has not ended, and the second None if that is not known.
        """
        last: dict[str, Any] = {}
        for event in self._events():
            if event.get("event") in ("start", "end"):
                last = event
        reason, when = str(last.get("reason") or "running"), last.get("time")
        if reason == "running" or not isinstance(when, int | float):
            return reason, None
        return reason, int(when * 1000)

    def _events(self) -> Iterator[dict[str, Any]]:
        return lines_of(self.path / "events.jsonl")


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by their names in trackers, such as train/loss."""
    return {
        _name(key): float(value)
        for key, value in record.items()
        if key not in ("step", "time") and isinstance(value, int | float)
    }


def _name(key: str) -> str:
    clean = "".join(letter if letter.isalnum() or letter in "_-. " else "_" for letter in key)
    if clean.startswith("validation_"):
        return f"validation/{clean.removeprefix('validation_')}"
    group = next((name for end, name in _ENDINGS.items() if clean.endswith(end)), "job")
    return f"{_GROUPS.get(clean, group)}/{clean}"
