"""Records how the time of a rank's main thread is divided among the phases of a step."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType

WAIT = "communication"
"""The phase of all waits for other ranks, see `watch.py`."""

STEP_PHASES = ("data", "forward", "backward", WAIT, "optimizer", "save", "evaluation")
"""All phases. What lies between them, such as a user's own code, is in none."""


class StepPhases:
    """Adds up the seconds of each phase. A phase inside of another one stops the outer one's clock.

    The main thread enters the object, as a context: `with phases("forward"):`. On GPUs autograd's
    thread does so, too, while the main thread waits for it. There the seconds are those of the
    processor, which hands out work. Where it waits for the GPU, that is a part of "backward".

    Attributes:
        seconds: the time of each phase so far.
        processor: the part of it in which the thread had a processor.
        listener: called at the end of each phase, with the phase, a text that says more (the
            operation that was waited for, the action of a pipeline), and its begin and end by
            `time.perf_counter`. None: nobody listens, which costs nothing.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self.listener: Callable[[str, str, float, float], None] | None = None
        self._next = ("", "")
        self._open: list[tuple[str, str, float]] = []  # phase, operation, begin
        self._since, self._processor_since = time.perf_counter(), time.thread_time()
        self._thread = threading.get_ident()

    def __call__(self, phase: str, operation: str = "") -> StepPhases:
        """Name the next phase. Returns this object, for `with`."""
        self._next = (phase, operation)
        return self

    def __enter__(self) -> None:
        now = time.perf_counter()
        self._count(now)
        self._open.append((*self._next, now))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        now = time.perf_counter()
        self._count(now)
        phase, operation, begin = self._open.pop()
        if self.listener is not None:
            self.listener(phase, operation, begin, now)

    def note(self, kind: str, what: str, begin: float, end: float, *numbers: int) -> None:
        """Tell the listener of work that is no phase of the main thread. Any thread may call it.

        Args:
            kind: see `hpc_train.monitoring.trace`.
            what: a text with a %d for each of `numbers`; nobody makes it if nobody listens.
            begin: seconds by `time.perf_counter`.
            end: the same for its end.
            numbers: for `what`.
        """
        listener = self.listener  # the main thread may take it away meanwhile
        if listener is not None:
            listener(kind, what % numbers, begin, end)

    def _count(self, now: float) -> None:
        """Count the time since the last change for the innermost phase."""
        used, thread = time.thread_time(), threading.get_ident()
        if self._open:
            phase = self._open[-1][0]
            self.seconds[phase] += now - self._since
            if thread == self._thread:  # each thread has a clock of its own
                self.processor[phase] += used - self._processor_since
        self._since, self._processor_since, self._thread = now, used, thread
