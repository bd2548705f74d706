"""Lengths of time in words, in one style for logs, tables, reports and plots."""

from __future__ import annotations

from itertools import pairwise

_LONG = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_SHORT = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def time_text(seconds: float) -> str:
    """A finite length of time in words.

    From a minute on it has two units, such as 3 h 20 min, or 5 min if the second one is 0. Shorter
    ones have three digits and the unit that suits them: 12.5 s, 2.52 ms, 0.25 us.
    """
    if round(abs(seconds)) >= 60:
        sign, whole = "-" if seconds < 0 else "", round(abs(seconds))
        for (name, size), (smaller, least) in pairwise(_LONG):
            if whole >= size:
                rest = whole % size // least
                return f"{sign}{whole // size} {name}" + (f" {rest} {smaller}" if rest else "")
    short = float(f"{seconds:.3g}")
    if not short:
        return "0 s"
    unit, length = next((one for one in _SHORT if abs(short) >= one[1]), _SHORT[-1])
    return f"{short / length:.3g} {unit}"
