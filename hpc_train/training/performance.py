"""Performance tests (`run.performance_test`): short runs that measure steps and save nothing."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_train import files
from hpc_train.config import RunConfig
from hpc_train.errors import plural
from hpc_train.job.reporting import RunReport
from hpc_train.job.run_directory import writable
from hpc_train.monitoring.performance import PERFORMANCE, usual_warmup
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.phases import STEP_PHASES
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.shared_cores import find_shared_cores
from hpc_train.times import time_text
from hpc_train.training.assemble import Assembly
from hpc_train.training.task import TrainingTask

logger = logging.getLogger(__name__)

OF_RECORDS = ("tflops", "mfu")  # keys of records whose medians are among the result


def without_extras(config: RunConfig, task: TrainingTask) -> tuple[RunConfig, TrainingTask]:
    """What a performance test trains: neither checkpoints nor held-out samples; else the same."""
    if not config.run.test_steps:
        return config, task
    changed = replace(
        config,
        run=replace(config.run, steps=config.run.test_steps, epochs=None, patience=0),
        data=replace(config.data, validation_every=0, importance=0),
        checkpoint=replace(config.checkpoint, every=0, minutes=0, mtbf_hours=0, keep_best=0),
    )
    return changed, replace(task, validation=None, scores=None, finish=None)


class PerformanceTest:
    """Notes the end of each step, and how the time was divided. All ranks call it.

    Args:
        batch: samples per step over the whole job.
        made: the parts of the job.
        tokens_per_sample: number of tokens of a sample; 0 if samples have no tokens.
    """

    def __init__(self, batch: int, made: Assembly, tokens_per_sample: float) -> None:
        self.batch, self.made, self.tokens_per_sample = batch, made, tokens_per_sample
        self.records: list[dict[str, Any]] = []
        """The records of the run; rank 0 only."""
        self._seconds: dict[str, list[float]] = {}
        self._before: dict[str, float] = {}

    @classmethod
    def of(
        cls, config: RunConfig, made: Assembly, tokens_per_sample: float
    ) -> PerformanceTest | None:
        """The test that a configuration asks for; None if it asks for none."""
        if not config.run.test_steps:
            return None
        return cls(config.data.batch, made, tokens_per_sample)

    def start(self, report: RunReport) -> None:
        """Begin with the first step, and note the records of the run."""
        report.listeners.append(self.records.append)
        if report.metrics is not None:
            with suppress(OSError):  # `finish` tells if the directory cannot be written
                (report.metrics.path.parent / PERFORMANCE).unlink(missing_ok=True)
        self._seconds = {name: [] for name in ("step", *STEP_PHASES)}
        self._before = self._clocks()

    def count_step(self) -> None:
        """Note the end of a step. On GPUs it is waited for."""
        device = self.made.device
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
        now = self._clocks()
        for name, seconds in self._seconds.items():
            seconds.append(now[name] - self._before[name])
        self._before = now

    def _clocks(self) -> dict[str, float]:
        spent = self.made.grid.world.waiting.phases.seconds
        return {"step": time.perf_counter(), **{name: spent[name] for name in STEP_PHASES}}

    def finish(self, runtime: Runtime, directory: Path) -> None:
        """Write the result and log it. Collective.

        Args:
            runtime: the job's runtime.
            directory: the run directory.
        """
        shared = find_shared_cores(runtime.world)
        grid = self.made.grid
        result = {
            "ranks": grid.world.size,
            "hosts": len(grid.placement.topology.hosts),
            "layout": {"dp": grid.dp, "tp": grid.tp, "pp": grid.pp},
            "device": self.made.device.type,
            "batch": self.batch,
            "tokens_per_sample": self.tokens_per_sample,
            "shared_cores": shared,
            **self._figures(),
            "seconds": self._seconds,
        }
        with agreed(runtime.world), writable(directory):
            if runtime.world.rank == 0:
                files.write_text(directory / PERFORMANCE, f"{json.dumps(result)}\n")
        if runtime.world.rank == 0:
            logger.info("%s", describe_test(result))

    def _figures(self) -> dict[str, Any]:
        """The medians over the steps that count, and the quartiles of the step's seconds."""
        every = self._seconds["step"]
        dropped = usual_warmup(len(every))
        low, middle, high = np.quantile(every[dropped:], [0.25, 0.5, 0.75]).tolist()
        figures: dict[str, Any] = {
            "warmup": dropped,
            "step_seconds": middle,
            "step_seconds_quartiles": [low, high],
            "samples_per_second": self.batch / middle,
        }
        if self.tokens_per_sample:
            figures["tokens_per_second"] = self.batch * self.tokens_per_sample / middle
        for key in OF_RECORDS:
            found = [one[key] for one in self.records if one["step"] > dropped and one.get(key)]
            if found:
                figures[key] = float(np.median(found))
        return figures


def describe_test(result: dict[str, Any]) -> str:
    """The result of a performance test in a line."""
    steps, layout = len(result["seconds"]["step"]), result["layout"]
    low, high = result["step_seconds_quartiles"]
    sizes = " x ".join(f"{axis} {layout[axis]}" for axis in ("dp", "tp", "pp"))
    parts = [
        f"performance test on {plural(result['ranks'], 'rank')} ({sizes}): median step of the last "
        f"{steps - result['warmup']} of {steps}: {time_text(result['step_seconds'])} (quartiles "
        f"{time_text(low)} and {time_text(high)})",
        f"{result['samples_per_second']:.4g} samples/s",
    ]
    if "tokens_per_second" in result:
        parts.append(f"{result['tokens_per_second']:.5g} tokens/s")
    if "tflops" in result:
        parts.append(f"{result['tflops']:.4g} TFLOP/s")
    if "mfu" in result:
        parts.append(f"{result['mfu']:.1%} of the measured peak")
    if result["shared_cores"]:
        parts.append(result["shared_cores"])
    return ", ".join(parts)
