"""Time spans as text: read and written in one way for every key, option and scheduler."""

from __future__ import annotations

import re

TIME_FORMS = "HH:MM:SS, D-HH:MM:SS or 1h30m"
"""The forms of a time span besides a plain number of seconds, for messages."""
_LONGEST = 20  # characters; Python turns no text of thousands of digits into a number
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", re.ASCII)
_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)


def parse_duration(text: str) -> int | None:
    """Read a time span.

    Args:
        text: "5400" (seconds), "1:30:00", "2-12:00:00" (two days and twelve hours), "1h30m", "45s".

    Returns:
        Seconds; None if the text has none of these forms, or is longer than any time span. "12:00"
        has none: it could be hours and minutes, or minutes and seconds.
    """
    if len(text) > _LONGEST:
        return None
    if text.isdecimal():
        return int(text)
    found = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    if not text or not found:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def format_duration(seconds: int) -> str:
    """Write a time span as HH:MM:SS, which SLURM and PBS read; there may be 100 hours and more."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
