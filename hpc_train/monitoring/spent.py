"""What a run has cost: node-hours and joules, as its records and events tell them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from hpc_train.files import lines_of

WITH_COSTS = ("metrics.jsonl", "events.jsonl")
_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))  # of units
TAIL_BYTES = 1 << 16  # of each of these files, among whose lines the last costs mostly are


@dataclass(frozen=True)
class SpentCosts:
    """What a run has cost since its first start.

    Args:
        node_hours: hours of wall time times nodes, start-up included.
        joules: the energy of the nodes, as far as it was read.
        metered_node_hours: the part of `node_hours` in which it was read.
    """

    node_hours: float = 0.0
    joules: float = 0.0
    metered_node_hours: float = 0.0

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Self:
        """The costs in a record, an event or a checkpoint; 0 for what it does not tell."""
        return cls(**{one.name: float(tree.get(one.name) or 0.0) for one in fields(cls)})

    def __add__(self, other: SpentCosts) -> SpentCosts:
        mine, theirs = asdict(self), asdict(other)
        return SpentCosts(**{name: mine[name] + theirs[name] for name in mine})

    def __sub__(self, other: SpentCosts) -> SpentCosts:
        return self + SpentCosts(-other.node_hours, -other.joules, -other.metered_node_hours)

    def known(self) -> dict[str, float]:
        """The costs as parts of a record. Joules are missing if none were read."""
        found = asdict(self)
        return found if self.joules else {"node_hours": self.node_hours}

    @property
    def metered_share(self) -> float:
        """The share of the time in which the energy was read."""
        return self.metered_node_hours / self.node_hours if self.node_hours else 0.0

    def describe(self) -> str:
        """The costs in words."""
        hours = f"{in_three_digits(self.node_hours)} node-hours"
        if not self.joules:
            return f"{hours} so far; no energy was read"
        text = f"{hours} and {describe_joules(self.joules)} so far"
        return f"{text}; the energy was {self.read_in}" if self.read_in else text

    @property
    def read_in(self) -> str:
        """In which part of the time the energy was read, in words; "" if in all of it."""
        share = self.metered_share
        return f"read in {100 * share:.0f} % of the time" if self.joules and share < 0.995 else ""


def describe_joules(joules: float) -> str:
    """An energy in words, as in "3.1 MJ (861 Wh)"."""
    return f"{prefixed(joules, 'J')} ({prefixed(joules / 3600, 'Wh')})"


def prefixed(value: float, unit: str) -> str:
    """A number in three digits with a prefix of its unit, as in "3.1 MJ"."""
    value = float(f"{value:.3g}")  # before the prefix is chosen, else 999.9 kJ were 1000 kJ
    prefix, size = next((one for one in _PREFIXES if abs(value) >= one[1]), ("", 1.0))
    return f"{in_three_digits(value / size)} {prefix}{unit}".rstrip()


def in_three_digits(value: float) -> str:
    """A number in three digits; one of up to nine digits with all of those before its point."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


def costs_in(directory: Path) -> SpentCosts:
    """The largest costs that records and events of a run directory tell of."""
    return max((_largest(directory / name) for name in WITH_COSTS), key=lambda one: one.node_hours)


def _largest(path: Path) -> SpentCosts:
    """The largest costs in a file. Lines may be long: the event of a start names all ranks."""
    largest = SpentCosts()
    for last_bytes in (TAIL_BYTES, None):
        for record in lines_of(path, last_bytes):
            with suppress(ValueError, TypeError, OverflowError):  # a damaged line
                largest = max(largest, SpentCosts.of(record), key=lambda one: one.node_hours)
        if largest.node_hours:
            break
    return largest
