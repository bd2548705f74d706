"""Shows progress on rank 0's console: a live line on a terminal, plain lines in a batch log."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from typing import Protocol

import rich.progress
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

TIME_AND_BAR = 8 + 10 + 3  # characters of the time left, of a short bar, and between columns

MOST_FIXED = 1e9  # the least number that is written with an exponent

logger = logging.getLogger(__name__)


def describe_record(record: Mapping[str, float]) -> str:
    """Describe a record of metrics in a short line. Missing metrics are left out."""
    shown = [f"step {record['step']:.0f}"]
    hidden = set() if record.get("skipped_steps") else {"skipped_steps"}
    if "tokens_per_second" in record:
        hidden |= {"samples_per_second", "samples_per_joule"}
    for key, text, form in (
        ("loss", "loss {}", ".4f"),
        ("validation_loss", "validation {}", ".4f"),
        ("lr", "lr {}", ".2e"),
        ("grad_norm", "grad norm {}", ".3f"),
        ("skipped_steps", "{} skipped", ".0f"),
        ("tokens_per_second", "{} tokens/s", ".0f"),
        ("samples_per_second", "{} samples/s", ".1f"),
        ("mfu", "MFU {}", ".1%"),
        ("tokens_per_joule", "{} tokens/J", ".3g"),
        ("samples_per_joule", "{} samples/J", ".3g"),
    ):
        if key in record and key not in hidden:
            shown.append(text.format(_written(record[key], form)))
    return "  ".join(shown)


def _written(value: float, form: str) -> str:
    """A number with fixed places, unless these show less than three digits of it, or very many."""
    if form.endswith("f") and value and not 10.0 ** (2 - int(form[1])) <= abs(value) < MOST_FIXED:
        form = ".3g"
    return format(value, form)


def describe_scores(scores: Mapping[str, float]) -> str:
    """Describe scores of a model in a short line, in their order."""
    return ", ".join(f"{name.replace('_', ' ')} {score:.5g}" for name, score in scores.items())


class ProgressDisplay(Protocol):
    """Shows the records of a run when they are made."""

    def show(self, record: Mapping[str, float]) -> None:
        """Show a record."""

    def close(self) -> None:
        """Leave the console as it was."""


class PlainProgress:
    """Logs a line for each record."""

    def show(self, record: Mapping[str, float]) -> None:
        """Log a record."""
        logger.info(describe_record(record))

    def close(self) -> None:
        """Do nothing, as nothing is open."""


def shorter_line(line: str, room: int) -> str:
    """A line of `describe_record` without parts in its middle, so that it fits if it can."""
    parts = line.split("  ")
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts.pop(max(1, len(parts) - 2))
    return "  ".join(parts)


class LiveProgress:
    """Redraws a bar in place. What is printed meanwhile appears above the bar.

    On a narrow terminal the text is shortened, not the counts and the time that is left.

    Args:
        last_step: the run's last step.
    """

    def __init__(self, last_step: int) -> None:
        self._bar = rich.progress.Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            speed_estimate_period=math.inf,  # of the last 1000 records, however rare they are
        )
        self._others = 2 * len(str(last_step)) + 1 + TIME_AND_BAR
        self._task = self._bar.add_task("starting", total=last_step)
        self._bar.start()

    def show(self, record: Mapping[str, float]) -> None:
        """Redraw the bar with a record."""
        line = shorter_line(describe_record(record), self._bar.console.width - self._others)
        self._bar.update(self._task, completed=record["step"], description=line)

    def close(self) -> None:
        """Stop redrawing. The last state stays visible."""
        self._bar.stop()


def progress(last_step: int, *, alone: bool) -> ProgressDisplay:
    """Choose a display: live on a terminal, plain if output goes to a file or a pipe.

    Args:
        last_step: the run's last step.
        alone: whether no launcher stands between this process and its console. Open MPI gives ranks
            a pseudo-terminal even if their output goes to a batch log.
    """
    return LiveProgress(last_step) if alone and sys.stdout.isatty() else PlainProgress()
