"""What the ranks have communicated by operation, as an event and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_train.mpi.traffic import OperationTotals
from hpc_train.times import time_text

LOGGED = 4  # operations in the log; the event has all


def event_of(
    operations: Sequence[OperationTotals], links: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The operations as the event "communication" has them.

    Args:
        operations: what all ranks have communicated.
        links: what `preflight` has measured, as link_inside and link_across, in bytes/s.
    """
    places = {"inside": "inside nodes", "across": "between nodes"}
    return [
        {
            "name": f"{one.name} {places[one.link]}",
            "bytes": one.nbytes,
            "seconds": round(one.seconds, 6),
            "bandwidth": round(one.bandwidth),
            "limit": links.get(f"link_{one.link}"),
        }
        for one in operations
    ]


def describe_operations(operations: Sequence[Mapping[str, Any]]) -> str:
    """The largest operations in one line of the log."""
    parts = []
    for one in operations[:LOGGED]:
        text = f"{one['name']} {_in_bytes(one['bytes'])} in {time_text(one['seconds'])}"
        beside = f", preflight {_in_bytes(one['limit'])}/s" if one["limit"] else ""
        parts.append(f"{text} ({_in_bytes(one['bandwidth'])}/s{beside})")
    return "communication: " + "; ".join(parts)


def _in_bytes(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
