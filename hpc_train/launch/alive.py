"""Whether a job runs in a run directory, and how the last one ended."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.claim import FOLDER
from hpc_train.checkpoint.owner import NOWHERE, Owner
from hpc_train.files import lines_of
from hpc_train.launch.recent import LAST_BYTES
from hpc_train.launch.supervise import START

SILENCE = 90.0  # seconds without a heartbeat after which a job has ended; it beats every 10 s


def newest_claim(run: Path) -> Path:
    """The file of the job that owns a run directory; it need not exist. Its time is a heartbeat."""
    with suppress(OSError):
        numbers = [path.name for path in (run / FOLDER).iterdir() if path.name.isdigit()]
        return run / FOLDER / max(numbers, default="none")
    return run / FOLDER / "none"


def job_runs(run: Path) -> bool | None:
    """Whether a job runs in a run directory; None if there is no claim that could tell."""
    claim = newest_claim(run)
    try:
        owner, silent = Owner.of(claim.read_bytes()), time.time() - claim.stat().st_mtime
    except OSError:
        return None
    if claim.with_suffix(".free").exists():
        return False
    ended = None if owner is None else owner.has_ended(Owner.here(NOWHERE, 0.0))
    return silent <= SILENCE if ended is None else not ended


def state_in_words(run: Path) -> str:
    """What a run does, or how its last job ended; "" if none has begun."""
    runs = job_runs(run)
    if runs:
        return "running"
    events = [
        event
        for event in lines_of(run / "events.jsonl")  # all of it: a "start" names all ranks
        if event.get("event") in ("start", "end")
    ]
    last = events[-1] if events else {}
    attempts = list(lines_of(run / "launch.jsonl", LAST_BYTES))
    if attempts and (told := _told_of(attempts[-1], last)):
        return told
    if last.get("event") == "end":
        words = (str(last.get(key) or "") for key in ("reason", "why"))
        return ": ".join(word for word in words if word)
    return "no job runs, and no end is recorded" if events or runs is not None else ""


def _told_of(attempt: dict[str, Any], last: dict[str, Any]) -> str:
    """What the launcher's last line says that the job's last event does not know; "" if nothing.

    Args:
        attempt: the last line of launch.jsonl.
        last: the last start or end of events.jsonl; empty if there is none.
    """
    at, since = _seconds(attempt), _seconds(last)
    if attempt.get("event") == "start":
        # Nobody ends this line if the launcher itself was killed, so it counts for a while only.
        starts = since < at and time.time() - at < START
        restart = attempt.get("restart")
        number = f" (attempt {restart + 1})" if isinstance(restart, int) else ""
        return f"starting{number}" if starts else ""
    cause = str(attempt.get("cause") or "")
    lasted = attempt.get("seconds")
    # An end of the same attempt, if the job could write it, says more than the launcher knows.
    if last.get("event") == "end" and isinstance(lasted, int | float):
        at -= lasted
    return f"failed: {cause}" if cause and at >= since else ""


def _seconds(line: dict[str, Any]) -> float:
    found = line.get("time")
    return found if isinstance(found, int | float) else -math.inf
