"""Runs of a study as their files would say."""

from __future__ import annotations

import json
from pathlib import Path

from hpc_train.scaling.results import MeasuredRun

PHASES = ("data", "forward", "backward", "communication", "optimizer", "save", "evaluation")


def told(ranks: int, batch: int, steps: list[float], shared: str = "") -> dict:
    """A performance.json, with a node for each rank."""
    return {
        "ranks": ranks,
        "hosts": ranks,
        "layout": {"dp": ranks, "tp": 1, "pp": 1},
        "device": "cpu",
        "batch": batch,
        "tokens_per_sample": 10,
        "shared_cores": shared,
        "warmup": 1,
        "step_seconds": steps[-1],
        "seconds": {"step": steps, **{name: [s / 10 for s in steps] for name in PHASES}},
    }


def write_run(directory: Path, nodes: int, seconds: float, batch: int = 16) -> None:
    """Write the result of a run of four steps, whose first one is slow."""
    directory.mkdir(parents=True, exist_ok=True)
    steps = [9.0, seconds, seconds, seconds]
    (directory / "performance.json").write_text(json.dumps(told(nodes, batch, steps)))


def measured(nodes: int, seconds: float, batch: int = 16, shared: str = "") -> MeasuredRun:
    """A run whose steps all take the same time."""
    phases = dict.fromkeys(PHASES, seconds / 10)
    steps = (seconds,) * 4
    return MeasuredRun(nodes, steps, phases, told(nodes, batch, list(steps), shared))
