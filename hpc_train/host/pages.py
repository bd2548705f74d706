"""Gives pages of memory back to the operating system, and keeps their addresses."""

from __future__ import annotations

import ctypes
import mmap
import os

MADV_DONTNEED, MADV_REMOVE = 4, 9  # of Linux's madvise(2)


def give_back(address: int, nbytes: int, *, shared: bool) -> None:
    """Free the whole pages that lie in a range. They read as zeros until they are written again.

    Args:
        address: where the range begins.
        nbytes: its size.
        shared: whether processes share the memory. Then it is freed for all of them.

    Raises:
        OSError: the operating system cannot free this kind of memory.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if size <= 0:
        return
    library = ctypes.CDLL(None, use_errno=True)
    advice = MADV_REMOVE if shared else MADV_DONTNEED
    if library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
