"""The names under which a checkpoint has tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.checkpoint.fileformat import Entry, format_dtypes
from hpc_train.checkpoint.state import check_model, model_tensors
from hpc_train.errors import CheckpointMismatch


def forms_of(model):
    return {name: part.form for name, part in model_tensors(model, {}).items()}


@pytest.mark.parametrize("before", [False, True])
def test_a_model_that_was_wrapped_by_torch_compile_is_told(before):
    plain = nn.Sequential(nn.Linear(2, 2))
    pair = [forms_of(plain), forms_of(torch.compile(plain, backend="eager"))]
    saved, own = reversed(pair) if before else pair
    entries = {
        n: Entry(n, format_dtypes()[d], tuple(shape), 0, 0) for n, (d, shape) in saved.items()
    }
    with pytest.raises(CheckpointMismatch, match=r"torch.compile .* wrapped or not"):
        check_model(entries, own, "step-1")
    check_model(entries, saved, "step-1")
