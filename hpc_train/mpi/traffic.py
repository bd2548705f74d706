"""Counts what a rank communicates, by operation: bytes, and the time in which it was under way."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, NamedTuple

LinkKind = Literal["inside", "across"]
"""What an operation uses: the memory of a node, or the links between nodes."""


class Operation:
    """Counts one kind of communication of this rank, as a context around it.

    Several may be under way at once. Then the time counts once.

    Attributes:
        nbytes: bytes so far.
        seconds: the time so far in which at least one was under way. It includes waits for ranks
            that come later.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._under_way, self._since = 0, 0.0

    def __enter__(self) -> None:
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.seconds += time.perf_counter() - self._since


class Traffic:
    """All operations of a rank, by name and by what they use."""

    def __init__(self) -> None:
        self.operations: dict[tuple[str, LinkKind], Operation] = {}
        self.parts: list[Traffic] = []
        """What other threads count."""

    def of(self, name: str, link: LinkKind) -> Operation:
        """The operation of this name, which is made if it is new."""
        return self.operations.setdefault((name, link), Operation())

    def clear(self) -> None:
        """Count from 0 again. Nothing may be under way."""
        for part in (self, *self.parts):
            for one in part.operations.values():
                one.nbytes, one.seconds = 0, 0.0

    def counted(self) -> list[tuple[str, LinkKind, int, float]]:
        """Name, link, bytes and seconds of each operation that has moved something."""
        found: dict[tuple[str, LinkKind], tuple[int, float]] = {}
        for part in (self, *self.parts):
            for key, one in list(part.operations.items()):  # another thread may add one
                nbytes, seconds = found.get(key, (0, 0.0))
                found[key] = nbytes + one.nbytes, seconds + one.seconds
        return [(*key, *numbers) for key, numbers in found.items() if numbers[0]]


class OperationTotals(NamedTuple):
    """What all ranks have communicated by one operation.

    Args:
        name: the operation.
        link: what it uses.
        nbytes: bytes of all ranks.
        seconds: the mean time of the ranks that took part.
        bandwidth: bytes per second of a rank; between nodes, of a host.
    """

    name: str
    link: LinkKind
    nbytes: int
    seconds: float
    bandwidth: float


def totals(
    counted: Iterable[list[tuple[str, LinkKind, int, float]]], hosts: Iterable[Any]
) -> list[OperationTotals]:
    """Add up what the ranks have counted; the operation with most bytes comes first.

    Args:
        counted: what each rank has counted, by rank.
        hosts: the host of each rank.
    """
    found: dict[tuple[str, LinkKind], list[tuple[int, float, Any]]] = {}
    for rank, (mine, host) in enumerate(zip(counted, hosts, strict=True)):
        for name, link, nbytes, seconds in mine:
            sender = host if link == "across" else rank
            found.setdefault((name, link), []).append((nbytes, seconds, sender))
    made = []
    for (name, link), parts in found.items():
        nbytes = sum(part[0] for part in parts)
        seconds = sum(part[1] for part in parts) / len(parts)
        senders = len({part[2] for part in parts})
        bandwidth = nbytes / senders / seconds if seconds else 0.0
        made.append(OperationTotals(name, link, nbytes, seconds, bandwidth))
    return sorted(made, key=lambda one: -one.nbytes)
