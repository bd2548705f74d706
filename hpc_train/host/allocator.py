"""Make the C library keep memory that torch has freed, or return it."""

from __future__ import annotations

import ctypes
import os

# Constants of glibc's malloc.h, which mallopt(3) explains.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_TRIM, LARGEST_MMAP = (1 << 31) - 1, 1 << 25  # bytes, the most that mallopt accepts


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, to use it again.

    Each step allocates and frees the same tensors. By default glibc returns large blocks to the
    system and must fault them in, zeroed, in the next step. Averaging makes this worse, because
    gradients are freed during the backward pass. The process does not become larger, as it had that
    memory once. With another C library nothing happens. The user's own MALLOC_ variables and
    GLIBC_TUNABLES win.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, LARGEST_TRIM)
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP)


def return_freed_memory() -> None:
    """Return memory that this process has freed to the system, where whole pages are free.

    With another C library than glibc nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
