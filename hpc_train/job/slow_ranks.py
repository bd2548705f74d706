"""Lets the ranks exchange a few numbers now and then, so that rank 0 can name a slow one."""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_train.host.counters import Disturbances, ProcessCounters, frequency, temperature
from hpc_train.job.preflight import exchange
from hpc_train.monitoring import probes
from hpc_train.monitoring.device_seconds import DeviceSeconds
from hpc_train.monitoring.slow_ranks import (
    RANK_COLUMNS,
    Probes,
    RankTable,
    SlowRank,
    SlowRankTracker,
    line,
)
from hpc_train.mpi.phases import WAIT
from hpc_train.mpi.runtime import Runtime

Numbers = NDArray[np.float64]

logger = logging.getLogger(__name__)

WARM_UP = 2  # steps before the first that counts: they allocate memory, or write a profile
LEAST_STEPS = 5  # of a table, so that it has a scatter
LEAST_SECONDS = 0.5  # of a table
COST = 500  # a table covers as many times the seconds that an exchange takes
MOST_SECONDS = 2.5  # of a table, unless a single record's steps take longer
TRIAL_EXCHANGES = 5  # to find out what an exchange takes; the fastest counts
NOT_OWN = (WAIT, "save", "evaluation")
"""The phases that are not a rank's own time: no other rank waits longer because of them."""


class SlowRanks:
    """Measures this rank's steps, and names the rank that all others wait for.

    All ranks make it and call its methods after the same steps. Collective to make.

    Args:
        runtime: the runtime of the job.
        hosts: the host of each rank.
        stages: for each rank a number; ranks with the same number have the same work.
        device: measures a GPU's time; None for processors.
    """

    def __init__(
        self,
        runtime: Runtime,
        hosts: Sequence[str],
        stages: Sequence[int],
        device: DeviceSeconds | None = None,
    ) -> None:
        self.runtime, self.world = runtime, runtime.world
        self.hosts, self.stages, self.device = hosts, stages, device
        self.named: SlowRank | None = None
        """The rank that is slow now, on rank 0; None on the others."""
        self._phases = self.world.waiting.phases
        self._counters = ProcessCounters()
        self._tracker = SlowRankTracker()
        self._cost = self._exchange_seconds()
        self._least = self._least_next = LEAST_STEPS
        self.start()

    def start(self) -> None:
        """Begin to measure. The first steps do not count."""
        self._steps = -WARM_UP
        self._restart()

    def _restart(self) -> None:
        """Measure from now on."""
        self._own: list[float] = []
        self._data: list[float] = []
        if self.device is not None:
            self.device.take()
        self._seconds = dict(self._phases.seconds)
        self._processor = dict(self._phases.processor)
        self._counted = self._counters.read()
        self._begin_processor = time.thread_time()
        self._begin = self._last = time.perf_counter()
        self._last_not_own, self._last_data = self._not_own(), self._phases.seconds["data"]

    def _not_own(self) -> float:
        seconds = self._phases.seconds
        return sum(seconds[phase] for phase in NOT_OWN)

    def count_step(self) -> None:
        """Count one more step. Those of a profile do not count, nor does what was before it."""
        if self.world.comm is None:
            return
        if self._phases.listener is not None:  # a profile, on all ranks; it slows some of them down
            self._steps = -WARM_UP
            return
        self._steps += 1
        if self._steps <= 0:
            if self._steps == 0:
                self._restart()
            return
        now, not_own = time.perf_counter(), self._not_own()
        self._own.append(now - self._last - (not_own - self._last_not_own))
        self._last, self._last_not_own = now, not_own
        data = self._phases.seconds["data"]
        self._data.append(data - self._last_data)
        self._last_data = data

    def step(self) -> None:
        """Count one more step, and name a slow rank in the log if there is one. Collective."""
        self.count_step()
        self.take()

    def take(self) -> SlowRank | None:
        """Exchange numbers, if enough steps were taken since the last time. Collective.

        Returns:
            On rank 0 a rank that has become slow, which is logged here; None: there is nothing new.
        """
        if self.world.comm is None or self._steps < self._least:
            return None
        mine = self._measured()
        order = array("d", [*self._tracker.probes, self._least_next])
        with self.world.waiting("what the others try to find a slow rank"):
            self.world.comm.Bcast(order)
        mine |= self._tried(Probes(bool(order[0]), bool(order[1])))
        self._least = int(order[2])
        numbers = self._gathered(np.array([mine[name] for name in RANK_COLUMNS]))
        new = None if numbers is None else self._judged(numbers)
        self._steps = 0
        self._restart()
        return new

    def _gathered(self, row: Numbers) -> Numbers | None:
        """The rows of all ranks, on rank 0. Collective."""
        assert self.world.comm is not None
        rows = np.empty((self.world.size, len(row))) if self.world.rank == 0 else None
        with self.world.waiting("the numbers that show a slow rank"):
            self.world.comm.Gather(row, rows)
        return rows

    def _exchange_seconds(self) -> float:
        """What an exchange takes if nobody comes late, on rank 0. Collective."""
        if self.world.comm is None:
            return 0.0
        taken = []
        for _ in range(TRIAL_EXCHANGES):
            self.world.barrier()
            begin = time.perf_counter()
            self._gathered(np.zeros(len(RANK_COLUMNS)))
            taken.append(time.perf_counter() - begin)
        return 2 * min(taken)  # with the broadcast

    def _measured(self) -> dict[str, float]:
        """This rank's numbers per step, without those of probes."""
        steps, wall = self._steps, time.perf_counter() - self._begin
        used = time.thread_time() - self._begin_processor
        seconds = self._since(self._phases.seconds, self._seconds)
        processor = self._since(self._phases.processor, self._processor)
        computing = wall - sum(seconds.values())
        working = used - sum(processor.values())
        idle = max(0.0, computing - working)
        if self.device is not None:
            # The processor only hands out work: a rank is as late as its GPU.
            computing = max(computing, steps * self.device.take())
        counts = (
            now - then for now, then in zip(self._counters.read(), self._counted, strict=True)
        )
        found = {
            "wall": wall,
            "data": seconds["data"],
            "compute": computing,
            "processor": computing - idle,
            "waiting": seconds[WAIT],
            **Disturbances(*counts)._asdict(),
        }
        per_step = {name: value / steps for name, value in found.items()}
        scatters = {"scatter": self._own, "data_scatter": self._data}
        errors = {name: np.std(each, ddof=1) / math.sqrt(steps) for name, each in scatters.items()}
        return per_step | {name: float(error) for name, error in errors.items()}

    @staticmethod
    def _since(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
        """What phases have taken that are not computing."""
        return {name: now[name] - then.get(name, 0.0) for name in ("data", *NOT_OWN)}

    def _tried(self, wanted: Probes) -> dict[str, float]:
        """Numbers of the trials that rank 0 asks for, NaN where it does not. Collective."""
        names = ("frequency", "temperature", "arithmetic", "memory", "link")
        found = dict.fromkeys(names, math.nan)
        if wanted.processor:
            found["frequency"], found["temperature"] = frequency(), temperature()
            found["arithmetic"] = probes.arithmetic_seconds()
            found["memory"] = probes.memory_seconds()
        if wanted.links:
            leads = self.runtime.node.rank == 0
            leaders = self.world.split(0 if leads else 1, self.world.rank)
            if leads and leaders.comm is not None:
                found["link"] = exchange(leaders)
            leaders.close()
        return found

    def _judged(self, numbers: Numbers) -> SlowRank | None:
        """Look at the numbers of all ranks, and log what is new."""
        table = RankTable(numbers, self.stages, self.hosts)
        before = self._tracker.named
        new = self._tracker.note(table)
        self.named = self._tracker.named
        least = max(LEAST_SECONDS, min(COST * self._cost, MOST_SECONDS)) / table.wall
        self._least_next = max(LEAST_STEPS, math.ceil(least))
        if new is not None:
            logger.warning("%s", line(new, self.hosts))
        elif before is not None and self.named is None:
            logger.info("rank %d (%s) is not slow any more", before.rank, self.hosts[before.rank])
        return new
