"""Measures how fast training goes, and how long it waits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpc_train.monitoring.records import SECONDS_OF
from hpc_train.mpi.phases import STEP_PHASES
from hpc_train.mpi.watch import Watch


class Meter:
    """Averages over the steps since the last record.

    Args:
        batch: samples per step over the whole job.
        watch: measures how this rank's time is divided, and how long it has waited for others.
        tokens_per_sample: number of tokens of a sample; 0 if samples have no tokens.
        phases: the phases that steps have.
    """

    def __init__(
        self,
        batch: int,
        watch: Watch,
        tokens_per_sample: float = 0,
        phases: Sequence[str] = STEP_PHASES,
    ) -> None:
        self.batch = batch
        self.watch = watch
        self.tokens_per_sample, self.phases = tokens_per_sample, phases
        self.start()

    def start(self) -> None:
        """Begin to measure."""
        self._steps, self._begin = 0, time.perf_counter()
        self._before = dict(self.watch.phases.seconds)

    def count_step(self) -> None:
        """Count one more step."""
        self._steps += 1

    def take(self) -> dict[str, float]:
        """Return the averages since the last call, and start again.

        Keys are samples_per_second; step_seconds, and the seconds per step of each phase of it
        (`SECONDS_OF`); and tokens_per_second, if samples have tokens.
        """
        seconds = (time.perf_counter() - self._begin) / self._steps
        record = {
            "samples_per_second": self.batch / seconds,
            "step_seconds": seconds,
        }
        for phase in self.phases:
            spent = self.watch.phases.seconds[phase] - self._before.get(phase, 0.0)
            record[SECONDS_OF[phase]] = spent / self._steps
        if self.tokens_per_sample:
            record["tokens_per_second"] = self.batch * self.tokens_per_sample / seconds
        self.start()
        return record
