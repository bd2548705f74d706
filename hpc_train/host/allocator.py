"""Make the C library keep memory that torch has freed, or return it, or leave no gaps in it."""

from __future__ import annotations

import ctypes
import os

# Constants of glibc's malloc.h, which mallopt(3) explains.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_TRIM, LARGEST_MMAP = (1 << 31) - 1, 1 << 25  # bytes, the most that mallopt accepts
OWN_PAGES = 1 << 20  # bytes from which a block has pages of its own, once gaps are closed
WITH_GAPS = 1.5  # largest resident memory, divided by that of the tensors, without recomputation

_closed = False  # whether `close_gaps` was called


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, to use it again.

    Each step allocates and frees the same tensors. By default glibc returns large blocks to the
    system and must fault them in, zeroed, in the next step. Averaging makes this worse, because
    gradients are freed during the backward pass. The process does not become larger, as it had that
    memory once. With another C library nothing happens. The user's own MALLOC_ variables and
    GLIBC_TUNABLES win, and so does `close_gaps`.
    """
    if not _closed:
        _set_thresholds(LARGEST_MMAP)


def close_gaps() -> None:
    """Let this process leave no gaps between large blocks of memory, from now on.

    Tensors that live long lie between others that are freed soon. The gaps that these leave can be
    used for smaller tensors only. So a process becomes larger than its tensors, and recomputation
    saves little. After this call each large block has pages of its own, which go back to the system
    when it is freed. Fetching pages takes time. It takes less if torch asks for huge pages, which
    it does if it has allocated nothing before this call.
    """
    global _closed
    _closed = True
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _set_thresholds(OWN_PAGES)


def _set_thresholds(mmap: int) -> None:
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, LARGEST_TRIM)
        mallopt(MMAP_THRESHOLD, mmap)


def return_freed_memory() -> None:
    """Return memory that this process has freed to the system, where whole pages are free.

    With another C library than glibc nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
