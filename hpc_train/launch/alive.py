"""Whether a job runs in a run directory, and how the last one ended."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from hpc_train.checkpoint.claim import FOLDER
from hpc_train.checkpoint.owner import NOWHERE, Owner
from hpc_train.files import lines_of
from hpc_train.launch.recent import LAST_BYTES

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
    if events and events[-1]["event"] == "end":
        words = (str(events[-1].get(key) or "") for key in ("reason", "why"))
        return ": ".join(word for word in words if word)
    begun = events[-1].get("time") if events else None
    attempts = list(lines_of(run / "launch.jsonl", LAST_BYTES))
    for attempt in attempts[-1:]:  # says it of ranks that were killed
        told, ended = str(attempt.get("cause") or ""), attempt.get("time")
        later = isinstance(begun, int | float) and isinstance(ended, int | float) and ended >= begun
        if attempt.get("event") == "end" and told and (begun is None or later):
            return f"failed: {told}"
    return "no job runs, and no end is recorded" if events or runs is not None else ""
