"""What a traceback says at its end."""

from __future__ import annotations

import pytest

from hpc_train.errors import UserError
from hpc_train.job.exhausted import LESS, UNCOMPILED, note_remedy

Compiling = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})
OnGpu = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})


@pytest.mark.parametrize(
    ("error", "notes"),
    [
        (MemoryError(), [LESS]),
        (OnGpu("CUDA out of memory"), [LESS]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), [LESS]),
        (Compiling("No working C++ compiler found"), [UNCOMPILED]),
        (RuntimeError("shapes differ"), []),
    ],
)
def test_an_error_is_told_with_its_remedy(error, notes):
    note_remedy(error)
    assert getattr(error, "__notes__", []) == notes


def test_an_error_of_ours_that_came_while_torch_made_code_has_its_own_remedy():
    error = Compiling("UserError: no blocks: name them")
    error.__context__ = UserError("no blocks", "name them")
    note_remedy(error)
    assert not hasattr(error, "__notes__")
