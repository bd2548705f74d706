"""Errors of lack of memory among others."""

from __future__ import annotations

import pytest

from hpc_train.checkpoint.background import enough_memory
from hpc_train.errors import CheckpointError


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryError(), CheckpointError),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), CheckpointError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), CheckpointError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
    ],
)
def test_a_fault_of_a_gpu_is_not_told_as_lack_of_memory(error, raised):
    with pytest.raises(raised), enough_memory("extents", background=False):
        raise error
