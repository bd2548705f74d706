"""What happened to a run: its starts and ends, slow ranks, communication, samples of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_train.files import lines_of
from hpc_train.launch.protocol import QUEUED
from hpc_train.report.metrics import number

MOST_STARTS = 1000  # later starts of a run are not shown
MOST_GROUPS = 50  # of slow ranks that are shown
MOST_SAMPLES = 20
SAMPLE_CHARACTERS = 4000


@dataclass
class Start:
    """A start of a run, and how it ended.

    Args:
        time: seconds since 1970 at which it began.
        after: the step after which it trained; None if training never began.
        told: the event "start"; empty if there is none.
        ended: seconds since 1970 at which it ended; None if nobody wrote that down.
        last: the last finished step; None if it is not known.
        heard: seconds since 1970 of its last record, if nobody wrote its end down; else None.
        cause: why it ended; "" if it is not known.
        failed: whether it ended by a failure.
        followed: whether a later start has trained.
        lost: finished steps that the next start repeats; None if that is not known.
    """

    time: float
    after: int | None = None
    told: dict[str, Any] = field(default_factory=dict)
    ended: float | None = None
    last: int | None = None
    heard: float | None = None
    cause: str = ""
    failed: bool = False
    followed: bool = False
    lost: int | None = None


@dataclass
class NamedSlow:
    """A rank that was named slow for the same cause, one time or more."""

    rank: str
    host: str
    cause: str
    why: str
    times: int
    first: float
    last: float
    worst: float


@dataclass
class Story:
    """All that the files of a run say about what happened.

    Args:
        starts: in their order.
        slow: the ranks that were named slow, those with the greatest loss first.
        slow_now: those that were named slow since the newest start, whose layout is shown.
        communication: the operations of the newest event "communication".
        profiles: the events "profile".
    """

    starts: list[Start] = field(default_factory=list)
    slow: list[NamedSlow] = field(default_factory=list)
    slow_now: set[str] = field(default_factory=set)
    communication: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)

    @property
    def newest(self) -> dict[str, Any]:
        """The newest event "start"; empty if there is none."""
        return next((start.told for start in reversed(self.starts) if start.told), {})


def read_story(run: Path) -> Story:
    """Read the events of a run. Missing files, and lines that are no objects, say nothing."""
    story, groups = Story(), dict[tuple[str, ...], NamedSlow]()
    for event in lines_of(run / "events.jsonl"):
        match event.get("event"):
            case "start" if len(story.starts) < MOST_STARTS:
                story.slow_now.clear()
                story.starts.append(Start(_time(event), _whole(event.get("after")), event))
            case "end" if event.get("before_start") and len(story.starts) < MOST_STARTS:
                story.starts.append(Start(_time(event)))
                _end(story.starts[-1], event)
            case "end" if story.starts and story.starts[-1].ended is None:
                _end(story.starts[-1], event)
            case "slow":
                _count_slow(groups, event)
                story.slow_now.add(str(event.get("rank", "")))
            case "communication":
                found = event.get("operations")
                rows = found if isinstance(found, list) else []
                story.communication = [row for row in rows if isinstance(row, dict)]
            case "profile":
                story.profiles.append(event)
    story.slow = sorted(groups.values(), key=lambda group: -group.worst)[:MOST_GROUPS]
    _add_attempts(story, list(lines_of(run / "launch.jsonl")))
    _add_jobs(story, list(lines_of(run / QUEUED)))
    trained = [start for start in story.starts if start.after is not None]
    for before, after in pairwise(trained):
        before.followed = True
        reached_last(before, after.told.get("reached"), after.told.get("reached_time"))
        # An earlier version told a failed start's last record, which may be before the checkpoint.
        if before.last is not None and after.after is not None and before.last >= after.after:
            before.lost = before.last - after.after
    return story


def reached_last(start: Start, step: Any, time: Any) -> None:
    """Take from the last record of a start what it could not say at its end.

    Args:
        start: is changed.
        step: of the record.
        time: at which it was made.
    """
    reached = [known for known in (start.last, _whole(step)) if known is not None]
    start.last = max(reached, default=None)
    if start.ended is None and math.isfinite(number(time)):
        start.heard = number(time)


def _time(event: dict[str, Any]) -> float:
    seconds = number(event.get("time"))
    return seconds if math.isfinite(seconds) else 0.0


def _whole(value: Any) -> int | None:
    value = number(value)
    return int(value) if math.isfinite(value) else None


def _end(start: Start, event: dict[str, Any]) -> None:
    start.ended, start.last = _time(event), _whole(event.get("step"))
    reason, why = str(event.get("reason") or ""), str(event.get("why") or "")
    start.failed = reason == "failed"
    start.cause = ": ".join(word for word in (reason, why) if word)


def _count_slow(groups: dict[tuple[str, ...], NamedSlow], event: dict[str, Any]) -> None:
    rank, host, cause = (str(event.get(key, "")) for key in ("rank", "host", "cause"))
    step, seconds = number(event.get("step")), number(event.get("seconds"))
    group = groups.get((rank, host, cause))
    if group is None:
        if len(groups) < MOST_STARTS:
            why = str(event.get("why") or "")
            groups[rank, host, cause] = NamedSlow(
                rank, host, cause, why, 1, step, step, seconds if math.isfinite(seconds) else 0.0
            )
        return
    group.times += 1
    group.last = step
    if seconds > group.worst:
        group.worst, group.why = seconds, str(event.get("why") or "")


def _add_attempts(story: Story, records: Sequence[dict[str, Any]]) -> None:
    """Take from launch.jsonl what killed starts could not say, and attempts that never trained."""
    trained = [*story.starts]
    for begin, end, record in _attempts(records)[:MOST_STARTS]:
        inside = [start for start in trained if begin <= start.time < end]
        if not inside:
            inside = [Start(begin)]
            # The order of the events stays: the clock of a later start's host may be behind.
            later = (place for place, start in enumerate(story.starts) if start.time > begin)
            story.starts.insert(next(later, len(story.starts)), inside[0])
        start = inside[-1]
        if record and start.ended is None:
            start.ended = end
            step = _whole(record.get("step"))
            start.last = None if start.after is None or step == -1 else step  # -1: it is unknown
            code = _whole(record.get("code"))
            start.failed = bool(record.get("cause"))
            start.cause = str(record.get("cause") or f"exit code {code}")


def _attempts(records: Sequence[dict[str, Any]]) -> list[tuple[float, float, dict[str, Any]]]:
    """The beginning and the end of each attempt in launch.jsonl, and the line of its end.

    An attempt whose launcher was killed has no such line, and ends before the next one begins. A
    second launcher's attempt, which is refused, may lie within another one.
    """
    begun: list[float] = []
    ends: dict[float, dict[str, Any]] = {}
    for record in records:
        if record.get("event") == "start":
            begun.append(_time(record))
        elif record.get("event") == "end" and (alone := [b for b in begun if b not in ends]):
            lasted = number(record.get("seconds"))
            near = _time(record) - lasted if math.isfinite(lasted) else math.inf
            ends[min(reversed(alone), key=lambda begin: abs(near - begin))] = record
    later = [*begun, math.inf][1:]
    return [
        (begin, _time(ends[begin]), ends[begin]) if begin in ends else (begin, following, {})
        for begin, following in zip(begun, later, strict=True)
    ]


def _add_jobs(story: Story, records: Sequence[dict[str, Any]]) -> None:
    """Take from jobs.jsonl why jobs ended whose processes could not say it."""
    ends = {str(record.get("job")): record for record in records if record.get("event") == "ended"}
    for place, start in enumerate(story.starts):
        following = story.starts[place + 1] if place + 1 < len(story.starts) else None
        job = str(start.told.get("job") or "").rsplit(":", 1)[-1]
        end = ends.get(job)
        same = following is not None and following.told.get("job") == start.told.get("job")
        if end is not None and start.ended is None and not same:
            code = _whole(end.get("code"))
            start.ended = _time(end)
            start.failed = code not in (0, 75)
            start.cause = str(end.get("why") or f"exit code {code}")


def read_samples(run: Path) -> list[dict[str, str]]:
    """The newest samples of text of a run, with the keys step, prompt and text."""
    kept: list[dict[str, str]] = []
    for record in lines_of(run / "samples.jsonl"):
        sample = {key: str(record.get(key, "")) for key in ("step", "prompt", "text")}
        kept.append({key: text[:SAMPLE_CHARACTERS] for key, text in sample.items()})
        del kept[:-MOST_SAMPLES]
    return kept
