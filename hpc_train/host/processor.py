"""What kind of processor this is, and which library multiplies float32 matrices faster on it.

A choice by what the processor is, and not by a measurement at each start, gives equal bits on equal
machines. `hpc-train doctor` measures, and says where the table is wrong.
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
    best: str  # of AVX-512 and AVX2; "" for neither

    def __str__(self) -> str:
        return f"{self.vendor} with {self.best}" if self.best else f"{self.vendor} without AVX2"


class Processor(NamedTuple):
    """A processor as Linux describes it.

    Args:
        vendor: AMD, Intel or "another vendor".
        sets: which of the instruction sets in SETS it has, the best one first.
        family, model: the vendor's numbers; "" for others than AMD's and Intel's.
    """

    vendor: str
    sets: tuple[str, ...]
    family: str
    model: str

    @property
    def kind(self) -> ProcessorKind:
        """The row of the table that it belongs to; of AMX, float32 has no use."""
        return ProcessorKind(self.vendor, next((name for name in self.sets if name != "AMX"), ""))


class Measured(NamedTuple):
    """The speed of a GPT's training step with oneDNN, in times of the one with torch's products.

    Args:
        date: of the measurement by benchmarks/gpt_step.py.
        light, heavy: at 1 x 128 and at 8 x 128 tokens per step.
    """

    date: str
    light: float
    heavy: float


class Cell(NamedTuple):
    """Which way products go on a kind of processor, and the measurements that this rests on."""

    way: Way
    measured: tuple[Measured, ...] = ()

    def __str__(self) -> str:
        if not self.measured:
            return "which nobody has measured"
        return "measured " + " and ".join(one.date for one in self.measured)


TABLE = {
    # The second machine is of family 25 (Zen 4), which computes AVX-512 in two halves.
    ProcessorKind("AMD", "AVX-512"): Cell(
        "onednn", (Measured("2026-11-21", 1.68, 1.80), Measured("2026-11-22", 1.02, 1.03))
    ),
    ProcessorKind("AMD", "AVX2"): Cell("torch", (Measured("2026-11-22", 0.81, 0.85),)),
    ProcessorKind("Intel", "AVX-512"): Cell("torch"),
    ProcessorKind("Intel", "AVX2"): Cell("torch"),
}


def cell(kind: ProcessorKind) -> Cell:
    """What the table has for a kind of processor: torch's own way where it has nothing."""
    return TABLE.get(kind, Cell("torch"))


def parse_cpuinfo(cpuinfo: str) -> Processor:
    """The first processor of a text such as that of /proc/cpuinfo."""
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
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:  # no Linux
        return parse_cpuinfo("")
