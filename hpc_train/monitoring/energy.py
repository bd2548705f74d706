"""Adds up the energy of a node's sources while a job runs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from hpc_train.monitoring.energy_sources import EnergySource

COUNTER_SECONDS = 30.0  # seconds between two reads of counters
# Seconds between two reads of a meter of power: a tenth of the golden ratio's square. Steps of a
# training take no rational multiple of it, so reads do not keep time with them.
POWER_SECONDS = 0.26180339887498949
LONGEST_GAP = 30.0  # seconds between two reads of power that are integrated
CLOSE_SECONDS = 5.0  # seconds to wait for the end of a read
MOST_WATTS = 1000.0  # of what one counter that wraps counts: a processor with its memory

logger = logging.getLogger(__name__)


class EnergyMeter:
    """Adds up the joules of some sources from its making on. It may be used by several threads.

    Counters of energy give differences, whatever happens between two reads. One that wraps is read
    at least twice before it can wrap. If a read comes so late that it may have wrapped unseen, that
    time is not counted, neither as energy nor as time. Power is integrated by the trapezoidal rule;
    what lies between two reads that are more than LONGEST_GAP apart is not known, and not counted.

    Args:
        sources: what is read.
        clock: returns seconds.
    """

    def __init__(
        self, sources: Sequence[EnergySource], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sources = sources
        self.joules = 0.0
        """The energy so far."""
        self.seconds = 0.0
        """The time for which it was read, a mean over the sources."""
        self._clock = clock
        self._last: dict[str, tuple[float, float]] = {}  # time and value of the last good read
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.update()

    def update(self) -> None:
        """Read all sources. One that cannot be read is tried again the next time."""
        with self._lock:
            for source in self.sources:
                try:
                    value = source.read()
                except (OSError, ValueError) as error:
                    if source.name not in self._warned:
                        self._warned.add(source.name)
                        logger.warning(
                            "the energy of %s cannot be read now: %s", source.name, error
                        )
                    continue
                now = self._clock()
                if source.name in self._last:
                    self._count(source, value, now)
                self._last[source.name] = now, value

    def _count(self, source: EnergySource, value: float, now: float) -> None:
        """Add what a source has counted since its last read."""
        then, before = self._last[source.name]
        passed = now - then
        if passed > (LONGEST_GAP if source.is_power else source.wrap / MOST_WATTS or math.inf):
            return
        if source.is_power:
            more = passed * (before + value) / 2
        elif value >= before:
            more = value - before
        else:  # it has wrapped, or it was set to 0
            more = value + source.wrap - before if source.wrap else value
        self.joules += more
        self.seconds += passed / len(self.sources)

    def pause(self) -> float:
        """Seconds until the next read."""
        if any(source.is_power for source in self.sources):
            return POWER_SECONDS
        wraps = [source.wrap / MOST_WATTS / 2 for source in self.sources if source.wrap]
        return min([COUNTER_SECONDS, *wraps])


class EnergyThread:
    """Reads a meter's sources as often as they need it, in a thread of its own, until `close`.

    Args:
        meter: the meter.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self.meter = meter
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="energy", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.wait(self.meter.pause()):
            self.meter.update()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(CLOSE_SECONDS)  # a driver may hang, and the thread ends with the process
