"""The number of steps of a run, and the learning rate of each step. All functions are pure."""

from __future__ import annotations

import math

from hpc_train.config import OptimizerSection, RunSection
from hpc_train.errors import ConfigError


def last_step(section: RunSection, steps_per_epoch: int) -> int:
    """The number of the run's last step, from `run.steps` or else from `run.epochs`.

    Raises:
        ConfigError: neither is set.
    """
    if section.steps is not None:
        return section.steps
    if section.epochs is None:
        raise ConfigError("neither run.steps nor run.epochs is given", "give one of them")
    return section.epochs * steps_per_epoch


def scaling(section: OptimizerSection, ranks: int) -> float:
    """The factor that `lr_scaling` gives for a data-parallel size.

    linear: Goyal et al., https://arxiv.org/abs/1706.02677; sqrt: Krizhevsky,
    https://arxiv.org/abs/1404.5997.
    """
    return {"none": 1.0, "linear": float(ranks), "sqrt": math.sqrt(ranks)}[section.lr_scaling]


def learning_rate(section: OptimizerSection, step: int, last_step: int, ranks: int) -> float:
    """The learning rate of a step.

    Args:
        section: the configuration, with peak rate, warm-up and schedule.
        step: the step's number, from 1.
        last_step: the run's last step, at which linear and cosine schedules reach zero.
        ranks: data-parallel size, for `lr_scaling`.
    """
    peak = section.lr * scaling(section, ranks)
    if step <= section.warmup_steps:
        return peak * step / section.warmup_steps
    passed = (step - section.warmup_steps) / max(1, last_step - section.warmup_steps)
    if section.schedule == "linear":
        return peak * (1 - passed)
    if section.schedule == "cosine":
        return peak * (1 + math.cos(math.pi * passed)) / 2
    return peak
