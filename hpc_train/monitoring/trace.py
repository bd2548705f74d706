"""Marks of what a rank does and when, and their form in a trace of all ranks.

The form is the Trace Event Format of Chrome, which https://ui.perfetto.dev opens as well: a process
for each rank, a thread for each kind of work, and times in microseconds.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc_train.monitoring.gzip_parts import write_parts
from hpc_train.mpi.clocks import CommonTime
from hpc_train.mpi.group import Group
from hpc_train.mpi.phases import STEP_PHASES

MOST_MARKS = 1 << 18  # that a rank keeps, of about 250 bytes each; what comes later is only counted
STEP, BUCKET, CHECKPOINT = "step", "bucket", "checkpoint"
THREADS = {STEP: "steps", BUCKET: "sums of gradients", CHECKPOINT: "background saves"}
"""The names of the threads of marks that are no phases of the main thread, by kind."""
MAIN = "main thread"
LANES = 100  # numbers of threads for each kind: marks that overlap get several


class Mark(NamedTuple):
    """Something that took time.

    Args:
        kind: a phase, or a key of THREADS.
        what: says more, such as the operation that was waited for; may be "".
        begin: seconds by `time.perf_counter`.
        end: the same for its end.
    """

    kind: str
    what: str
    begin: float
    end: float


class Marks:
    """Collects marks, as a listener of `hpc_train.mpi.phases`. Any thread may add some."""

    def __init__(self, most: int = MOST_MARKS) -> None:
        self.most, self.lost = most, 0
        self.all: list[Mark] = []

    def __call__(self, kind: str, what: str, begin: float, end: float) -> None:
        """Add a mark."""
        if len(self.all) < self.most:
            self.all.append(Mark(kind, what, begin, end))
        else:
            self.lost += 1


def trace_events(
    rank: int, host: str, marks: Sequence[Mark], common: CommonTime, origin: float
) -> Iterator[dict[str, Any]]:
    """The events of a rank.

    Args:
        rank: its number.
        host: its host name.
        marks: what it has done.
        common: turns its times into those of rank 0.
        origin: the time by rank 0's clock at which the trace begins.
    """

    def about(what: str, thread: int, **values: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": values}

    def nanoseconds(time: float) -> int:
        return round(1e9 * (common(time) - origin))

    yield about("process_name", 0, name=f"rank {rank} ({host})")
    yield about("process_sort_index", 0, sort_index=rank)
    label = f"clock +-{1e6 * common.error:.0f} us, drift {1e6 * common.drift:.1f} ppm"
    yield about("process_labels", 0, labels=label)
    groups: dict[str, list[Mark]] = {kind: [] for kind in ("", *THREADS)}
    for mark in marks:
        groups["" if mark.kind in STEP_PHASES else mark.kind].append(mark)
    for number, (kind, some) in enumerate(groups.items()):
        # A mark that contains others comes first, also where they begin together.
        some.sort(key=lambda mark: (mark.begin, -mark.end))
        lanes = [0] * len(some) if not kind else _lanes(some)
        for lane in sorted({*lanes}):
            thread = LANES * number + lane
            name = THREADS.get(kind, MAIN) + (f" {lane + 1}" if lane else "")
            yield about("thread_name", thread, name=name)
            yield about("thread_sort_index", thread, sort_index=thread)
        for mark, lane in zip(some, lanes, strict=True):
            begin = nanoseconds(mark.begin)
            yield {
                "ph": "X",
                "name": mark.what or mark.kind,
                "cat": mark.kind,
                "pid": rank,
                "tid": LANES * number + lane,
                "ts": begin / 1000,
                "dur": (nanoseconds(mark.end) - begin) / 1000,
            }


def _lanes(marks: Sequence[Mark]) -> list[int]:
    """Numbers of lanes for marks in the order of their begins: none overlap in a lane."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # end, lane
    found = []
    for mark in marks:
        while busy and busy[0][0] <= mark.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else min(len(busy), LANES - 1)
        heapq.heappush(busy, (mark.end, lane))
        found.append(lane)
    return found


def write_trace(
    group: Group,
    path: Path,
    marks: Marks,
    common: CommonTime,
    origin: float,
    about: dict[str, Any],
) -> Exception | None:
    """Write the marks of all ranks to one file. Collective.

    Args:
        group: all ranks of the job.
        path: a file trace.json.gz.
        marks: what this rank has done.
        common: turns its times into those of rank 0.
        origin: the time by rank 0's clock at which the trace begins.
        about: what else the file says, on rank 0.

    Returns:
        The error of this rank, as from `write_parts`.
    """
    worst = group.largest(round(1e9 * common.error))
    lost = group.total(marks.lost)
    more = {**about, "clock_error_us": worst / 1000, "lost_marks": lost}

    def part() -> bytes:
        events = trace_events(group.rank, group.host, marks.all, common, origin)
        text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        return f"{',' if group.rank else ''}{text}\n".encode()

    end = f'],"displayTimeUnit":"ms","otherData":{json.dumps(more)}}}\n'
    return write_parts(group, path, part, b'{"traceEvents":[\n', end.encode())
