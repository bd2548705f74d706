"""Reports what happens in a run: rank 0 writes records and events, and shows them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.claim import Claim
from hpc_train.data.order import SampleOrder
from hpc_train.errors import Stopped, cause_in_words
from hpc_train.job.heartbeat import history
from hpc_train.job.run_directory import writable
from hpc_train.monitoring.console import ProgressDisplay, progress
from hpc_train.monitoring.records import RecordsFile
from hpc_train.monitoring.spent import SpentCosts
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.environment import read_launch
from hpc_train.mpi.group import Group
from hpc_train.trackers.choose import check_tracker
from hpc_train.trackers.source import TrackedRun
from hpc_train.trackers.thread import Trackers

logger = logging.getLogger(__name__)


@dataclass
class RunReport:
    """Writes the records of steps to metrics.jsonl, and events to events.jsonl.

    On ranks other than 0 all methods do nothing. Once another job has the claim on the run
    directory, nothing is written there.

    Args:
        claim: the claim on the run directory.
        metrics: metrics.jsonl; None on other ranks.
        events: events.jsonl; None on other ranks.
        display: shows the records; None: nothing is shown.
        always: is added to each record.
        begun: parts of the event "start": `steps`, the last step of the run, and the last step that
            was recorded before this start with the time of that record, if a record was dropped.
    """

    claim: Claim
    metrics: RecordsFile | None = None
    events: RecordsFile | None = None
    display: ProgressDisplay | None = None
    always: dict[str, Any] = field(default_factory=dict)
    begun: dict[str, Any] = field(default_factory=dict)
    listeners: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    """Functions that are called with each record on rank 0."""
    last_step: int = 0
    """The last finished step. Who takes the steps sets it after each one."""
    order: SampleOrder | None = None
    """The order of the samples; the last event says what each data set of a mixture has given."""
    ending: tuple[str, str] = ("finished", "")
    """The reason for the end, and what more there is to say, unless an error says it."""

    def record(self, record: dict[str, Any]) -> None:
        """Write, show and pass on the record of a step."""
        if self.metrics is None:
            return
        record = record | self.always | {"time": round(time.time(), 3)}
        if self.claim.lost() is None:
            self.metrics.write(record)
        if self.display is not None:
            self.display.show(record)
        for listener in self.listeners:
            listener(record)

    def event(self, event: str, step: int, **values: Any) -> None:
        """Write an event.

        Args:
            event: its kind, see docs/reference/files.md.
            step: the last finished step.
            values: what else there is to say, as JSON has it.
        """
        if self.events is not None and self.claim.lost() is None:
            self.events.write(
                {"time": round(time.time(), 3), "event": event, "step": step} | values
            )


@contextmanager
def reporting(
    group: Group,
    directory: Path,
    after: int,
    last_step: int,
    claim: Claim,
    *,
    shown: bool = True,
    trackers: Sequence[str] = (),
    spent: Callable[[], SpentCosts] | None = None,
) -> Iterator[RunReport]:
    """The reports of a run until its end. Collective.

    The last event is "end", with the reason for it and the costs, unless the process is killed.

    Args:
        group: the ranks of the job.
        directory: the run directory.
        after: the step after which training resumes; later records are dropped.
        last_step: the last step of the run.
        claim: the claim on the directory; once another job has it, nothing is written there.
        shown: whether the console shows the records.
        trackers: where the records are logged to besides, as `run.trackers` names it.
        spent: returns what the run has cost so far, and is called by rank 0 only; None: that is not
            counted.

    Raises:
        ConfigError: the directory cannot be written, or a tracker cannot work here.
    """
    with agreed(group), writable(directory):
        if group.rank == 0:
            for name in trackers:
                check_tracker(name)
            metrics = RecordsFile(directory / "metrics.jsonl", after)
            events = RecordsFile(directory / "events.jsonl")
    if group.rank:
        yield RunReport(claim)
        return
    alone = group.comm is None and not read_launch(os.environ)
    display = progress(last_step, alone=alone) if shown else None
    with ExitStack() as open_until_end:
        for made in (metrics, events, display):
            if made is not None:
                open_until_end.enter_context(closing(made))
        last = metrics.dropped
        reached = {"reached": last["step"], "reached_time": last.get("time")} if last else {}
        begun = {"steps": last_step} | reached
        report = RunReport(
            claim, metrics, events, display, history(after, reached.get("reached", 0)), begun
        )
        if trackers:
            run = TrackedRun(directory, directory)
            threads = Trackers(run, trackers, allowed=lambda: claim.lost() is None)
            open_until_end.enter_context(closing(threads))
            report.listeners.append(threads.listen)
        report.last_step = after
        try:
            yield report
        except Stopped as stopped:
            _end(report, spent, stopped.step, reason="stopped", why=stopped.reason)
            raise
        except BaseException as error:
            _end(report, spent, report.last_step, reason="failed", why=cause_in_words(error))
            raise
        reason, why = report.ending
        more = {"why": why} if why else {}
        _end(report, spent, report.last_step, reason=reason, **more)


def _end(
    report: RunReport, spent: Callable[[], SpentCosts] | None, step: int, **reason: str
) -> None:
    costs = None if spent is None else spent()
    more: dict[str, Any] = {} if costs is None else costs.known()
    if report.order is not None and (drawn := report.order.drawn(step)):
        more["mixture_samples"] = drawn
    report.event("end", step, **reason, **more)
    if costs is not None:
        logger.info("this run has cost %s", costs.describe())
