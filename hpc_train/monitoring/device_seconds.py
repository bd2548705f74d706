"""Measures how long a GPU works on what a rank hands to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

KEPT = 64  # pairs of events; older ones are forgotten


class DeviceSeconds:
    """A context around what a GPU computes. To enter it costs microseconds and waits for nothing.

    Args:
        event: makes an event that has `record`, `query` and `elapsed_time` in milliseconds.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._pairs: deque[tuple[Any, Any]] = deque(maxlen=KEPT)
        self._begin: Any = None

    @classmethod
    def of(cls, device: torch.device) -> DeviceSeconds | None:
        """The measurement for a device; None for processors."""
        if device.type == "cpu":
            return None
        kind = getattr(torch, device.type).Event
        return cls(lambda: kind(enable_timing=True))

    def __enter__(self) -> None:
        self._begin = self._event()
        self._begin.record()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = self._event()
        end.record()
        self._pairs.append((self._begin, end))

    def take(self) -> float:
        """The mean seconds of those that have ended since the last call; 0 if there is none."""
        found = [begin.elapsed_time(end) / 1e3 for begin, end in self._pairs if end.query()]
        self._pairs.clear()
        return sum(found) / len(found) if found else 0.0
