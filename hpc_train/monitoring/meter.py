"""Measures how fast training goes, and how long it waits."""

from __future__ import annotations

import time

from hpc_train.mpi.watch import Watch


class Meter:
    """Averages over the steps since the last record.

    Args:
        batch: samples per step over the whole job.
        watch: measures how long this rank has waited for others.
        tokens_per_sample: number of tokens of a sample; 0 if samples have no tokens.
    """

    def __init__(self, batch: int, watch: Watch, tokens_per_sample: float = 0) -> None:
        self.batch = batch
        self.watch = watch
        self.tokens_per_sample = tokens_per_sample
        self.data_seconds = 0.0
        """Seconds that steps have waited for batches since the last record. Callers add to it."""
        self.start()

    def start(self) -> None:
        """Begin to measure."""
        self._steps, self._begin, self.data_seconds = 0, time.perf_counter(), 0.0
        self._waited = self.watch.seconds

    def count_step(self) -> None:
        """Count one more step."""
        self._steps += 1

    def take(self) -> dict[str, float]:
        """Return the averages since the last call, and start again.

        Keys are samples_per_second; step_seconds, data_seconds and comm_seconds per step; and
        tokens_per_second, if samples have tokens.
        """
        seconds = (time.perf_counter() - self._begin) / self._steps
        record = {
            "samples_per_second": self.batch / seconds,
            "step_seconds": seconds,
            "data_seconds": self.data_seconds / self._steps,
            "comm_seconds": (self.watch.seconds - self._waited) / self._steps,
        }
        if self.tokens_per_sample:
            record["tokens_per_second"] = self.batch * self.tokens_per_sample / seconds
        self.start()
        return record
