"""Kinds of processor, from what Linux says of them."""

from __future__ import annotations

import pytest

from hpc_train.host import processor
from hpc_train.host.processor import TABLE, ProcessorKind, cell, parse_cpuinfo

COMMON = "fpu sse sse2 ssse3 fma sse4_1 sse4_2 avx f16c rdrand bmi1 avx2 bmi2"
AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"


def cpuinfo(vendor, family, model, name, flags):
    """Two processors as Linux shows them, without most of the lines."""
    each = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
    each += f"model name\t: {name}\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\n"
    return "".join(f"processor\t: {number}\n{each}\n" for number in range(2))


EPYC_7763 = cpuinfo("AuthenticAMD", 25, 1, "AMD EPYC 7763 64-Core Processor", COMMON)
EPYC_9654 = cpuinfo("AuthenticAMD", 25, 17, "AMD EPYC", f"{COMMON} {AVX512} avx512_vnni")
OPTERON = cpuinfo("AuthenticAMD", 21, 1, "AMD Opteron(TM) 6276", "fpu sse sse2 sse4_2 avx fma4")
XEON_E5 = cpuinfo("GenuineIntel", 6, 79, "Intel(R) Xeon(R) CPU E5-2687W v4", COMMON)
XEON_PHI = cpuinfo("GenuineIntel", 6, 87, "Intel(R) Xeon Phi(TM) CPU 7250", f"{COMMON} avx512f")
SAPPHIRE_RAPIDS = cpuinfo(
    "GenuineIntel", 6, 143, "Intel(R) Xeon(R) 8480+", f"{COMMON} {AVX512} amx_bf16 amx_tile"
)
HYGON = cpuinfo("HygonGenuine", 24, 1, "Hygon C86 7185 32-core Processor", COMMON)
NEOVERSE = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd aes sve\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "kind", "sets"),
    [
        (EPYC_7763, ("AMD", "AVX2"), ("AVX2",)),
        (EPYC_9654, ("AMD", "AVX-512"), ("AVX-512", "AVX2")),
        (OPTERON, ("AMD", ""), ()),
        (XEON_E5, ("Intel", "AVX2"), ("AVX2",)),
        (XEON_PHI, ("Intel", "AVX2"), ("AVX2",)),  # a part of AVX-512 that libraries do not use
        (SAPPHIRE_RAPIDS, ("Intel", "AVX-512"), ("AMX", "AVX-512", "AVX2")),
        (HYGON, ("another vendor", "AVX2"), ("AVX2",)),
        (NEOVERSE, ("another vendor", ""), ()),
        ("", ("another vendor", ""), ()),
    ],
)
def test_kinds_are_told_from_vendor_and_flags(text, kind, sets):
    found = parse_cpuinfo(text)
    assert (found.kind, found.sets) == (ProcessorKind(*kind), sets)


def test_family_and_model_are_the_vendors_numbers():
    assert (parse_cpuinfo(EPYC_9654).family, parse_cpuinfo(EPYC_9654).model) == ("25", "17")


def test_kinds_in_words():
    assert str(parse_cpuinfo(EPYC_7763).kind) == "AMD with AVX2"
    assert str(parse_cpuinfo(NEOVERSE).kind) == "another vendor without AVX2"


def test_a_cell_has_the_way_that_its_measurements_say():
    for row in TABLE.values():
        for one in row.measured:
            assert min(one.light, one.heavy) > 1 if row.way == "onednn" else one.light < 1


@pytest.mark.parametrize("text", [OPTERON, XEON_E5, HYGON, NEOVERSE])
def test_what_nobody_has_measured_takes_torchs_own(text):
    found = cell(parse_cpuinfo(text).kind)
    assert (found.way, str(found)) == ("torch", "which nobody has measured")


def test_a_measured_cell_says_when():
    assert str(cell(parse_cpuinfo(EPYC_7763).kind)) == "measured 2026-11-22"
    assert cell(parse_cpuinfo(SAPPHIRE_RAPIDS).kind).way == "torch"


def test_this_machine_has_a_kind():
    assert str(processor.here().kind)
