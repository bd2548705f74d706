"""Memory that was freed is used again, and not fetched from the system anew."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PAGES_OF_A_STEP = (8 << 20) // os.sysconf("SC_PAGE_SIZE")
PROGRAM = """
import ctypes, resource
from hpc_train.host.allocator import close_gaps, keep_freed_memory
{set_up}
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]

def step():
    blocks = [library.malloc(1 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks:
        library.free(block)

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(set_up: str = "keep_freed_memory()", **variables: str) -> int:
    """Pages that ten steps have to fetch."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM.format(set_up=set_up)]
    done = subprocess.run(
        command, env=environ | variables, check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_steps_fetch_no_memory_anew():
    assert faults() < PAGES_OF_A_STEP / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_the_users_own_setting_stays():
    assert faults(MALLOC_TRIM_THRESHOLD_="1000000") > 5 * PAGES_OF_A_STEP


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_without_gaps_large_blocks_go_back_also_after_averaging_begins():
    made = "keep_freed_memory(); close_gaps(); keep_freed_memory()"
    assert faults(made) > 5 * PAGES_OF_A_STEP
