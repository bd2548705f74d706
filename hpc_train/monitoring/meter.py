"""How fast training goes, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Waiting:
    """Seconds that steps have waited, added up until `Meter.take`.

    Args:
        data: for the next batch.
        communication: for other ranks.
    """

    data: float = 0.0
    communication: float = 0.0


class Meter:
    """Averages over the steps since the last record.

    Args:
        batch: samples per step over the whole job.
        tokens_per_sample: 0 where samples have no tokens.
    """

    def __init__(self, batch: int, tokens_per_sample: int = 0) -> None:
        self.batch = batch
        self.tokens_per_sample = tokens_per_sample
        self.waiting = Waiting()
        self._steps = 0
        self._begin = time.perf_counter()

    def start(self) -> Waiting:
        """Begin to measure; returns where others add what they wait for."""
        self._steps, self._begin = 0, time.perf_counter()
        return self.waiting

    def count_step(self) -> None:
        """One more step is done."""
        self._steps += 1

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Count a block as waiting for communication."""
        begin = time.perf_counter()
        yield
        self.waiting.communication += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """The averages since the last call, and begin anew."""
        now = time.perf_counter()
        seconds = (now - self._begin) / self._steps
        record = {
            "samples_per_second": self.batch / seconds,
            "step_seconds": seconds,
            "data_seconds": self.waiting.data / self._steps,
            "comm_seconds": self.waiting.communication / self._steps,
        }
        if self.tokens_per_sample:
            record["tokens_per_second"] = self.batch * self.tokens_per_sample / seconds
        self.waiting.data = self.waiting.communication = 0.0
        self._steps, self._begin = 0, now
        return record
