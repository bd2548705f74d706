"""What the ranks have communicated by operation, as an event and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_train.mpi.traffic import OperationTotals

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
        text = f"{one['name']} {_gb(one['bytes'])} in {one['seconds']:.1f} s"
        beside = f", preflight {_gb(one['limit'])}/s" if one["limit"] else ""
        parts.append(f"{text} ({_gb(one['bandwidth'])}/s{beside})")
    return "communication: " + "; ".join(parts)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
