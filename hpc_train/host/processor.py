"""A table: the library that multiplies float32 matrices faster on each kind of processor.

A choice by a table gives equal bits on equal machines; a measurement at each start would not.
`hpc-train doctor` measures, and says if the table is wrong.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal, NamedTuple

Way = Literal["onednn", "torch"]
Matmul = Literal["auto", "onednn", "torch"]

VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
# The flags of each instruction set, the best set first. Libraries use AVX-512 only where a
# processor has all of these parts of it.
SETS = {
    "AMX": {"amx_tile"},
    "AVX-512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "AVX2": {"avx2", "fma"},
}


class ProcessorKind(NamedTuple):
    """A kind of processor: a row of the table."""

    vendor: str
    best: str  # the better one that it has of AVX-512 and AVX2; "" for neither

    def __str__(self) -> str:
        return f"{self.vendor} with {self.best}" if self.best else f"{self.vendor} without AVX2"


class Processor(NamedTuple):
    """A processor as Linux describes it.

    Args:
        vendor: AMD, Intel or "another vendor".
        sets: the instruction sets of SETS that it has, the best one first.
        family, model: the vendor's numbers for it; "" if /proc/cpuinfo has none.
    """

    vendor: str
    sets: tuple[str, ...]
    family: str
    model: str

    @property
    def kind(self) -> ProcessorKind:
        """The row of the table that it belongs to. AMX does not count, as it has no float32."""
        return ProcessorKind(self.vendor, next((name for name in self.sets if name != "AMX"), ""))


class Measured(NamedTuple):
    """The speed of a GPT's training step with oneDNN, divided by its speed with torch's products.

    Args:
        date: the date on which benchmarks/gpt_step.py measured it.
        light: the result with 1 x 128 tokens per step.
        heavy: the result with 8 x 128 tokens per step.
    """

    date: str
    light: float
    heavy: float


class Cell(NamedTuple):
    """The choice for a kind of processor, and the measurements that it is based on."""

    way: Way
    measured: tuple[Measured, ...] = ()

    def __str__(self) -> str:
        if not self.measured:
            return "which nobody has measured"
        return "measured " + " and ".join(one.date for one in self.measured)


TABLE = {
    # The second machine has family 25 (Zen 4), which computes AVX-512 in two halves.
    ProcessorKind("AMD", "AVX-512"): Cell(
        "onednn", (Measured("2026-11-21", 1.68, 1.80), Measured("2026-11-22", 1.02, 1.03))
    ),
    ProcessorKind("AMD", "AVX2"): Cell("torch", (Measured("2026-11-22", 0.81, 0.85),)),
    ProcessorKind("Intel", "AVX-512"): Cell("torch", (Measured("2026-11-29", 0.90, 0.92),)),
    ProcessorKind("Intel", "AVX2"): Cell("torch"),
}


def cell(kind: ProcessorKind) -> Cell:
    """The table's entry for a kind of processor. Without an entry the choice is torch's own way."""
    return TABLE.get(kind, Cell("torch"))


def parse_cpuinfo(cpuinfo: str) -> Processor:
    """The first processor in a text of the form of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    vendor = VENDORS.get(fields.get("vendor_id", ""), "another vendor")
    sets = tuple(name for name, needed in SETS.items() if needed <= flags)
    return Processor(vendor, sets, fields.get("cpu family", ""), fields.get("model", ""))


@functools.cache
def here() -> Processor:
    """This machine's processor."""
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:  # this is not Linux
        return parse_cpuinfo("")
