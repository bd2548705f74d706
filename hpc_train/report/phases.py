"""How the time of a step is divided."""

from __future__ import annotations

import math

import numpy as np

from hpc_train.report.decimation import Curve, Floats
from hpc_train.report.sources import RunSource

PHASES = {
    "data": "data_seconds",
    "forward": "forward_seconds",
    "backward": "backward_seconds",
    "communication": "comm_seconds",
    "optimizer": "optimizer_seconds",
    "save": "save_seconds",
    "evaluation": "evaluation_seconds",
    "other": "",
}
"""The phases, in the order in which they are stacked, and their keys. The last one is the rest."""


def divided(curves: dict[str, Curve]) -> dict[str, Floats]:
    """For each phase the mean seconds per step of each bucket; empty without step_seconds."""
    if "step_seconds" not in curves:
        return {}
    whole = curves["step_seconds"].mean()
    found = {
        phase: np.nan_to_num(curves[key].mean()) for phase, key in PHASES.items() if key in curves
    }
    rest = whole - np.sum(list(found.values()), axis=0) if found else whole
    return found | {"other": np.fmax(rest, 0.0)}


def shares(source: RunSource) -> dict[str, tuple[float, float]]:
    """For each phase its mean seconds per step, and its share in percent; empty if unknown."""
    whole = source.mean("step_seconds")
    if not math.isfinite(whole) or whole <= 0:
        return {}
    found = {phase: source.mean(key) for phase, key in PHASES.items() if key}
    found = {phase: value for phase, value in found.items() if math.isfinite(value) and value > 0}
    if not found:
        return {}
    found["other"] = max(0.0, whole - sum(found.values()))
    total = sum(found.values())
    return {phase: (value, 100 * value / total) for phase, value in found.items()}
