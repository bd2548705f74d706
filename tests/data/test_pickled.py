"""Copies of data sets have the values, and no memory, of the original."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_train.data.pickled import copy_of


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.arange(5000.0)[::2],
        torch.arange(5000.0).view(50, 100).t(),
        torch.ones(3000, dtype=torch.bfloat16),
        torch.full((3000,), 1 + 2j).conj(),
        torch.full((3000,), 1 + 2j).conj().imag,
    ],
    ids=["empty", "strided", "turned", "16 bits", "conjugate", "negative"],
)
def test_a_tensor_is_copied_with_its_values(tensor):
    made = copy_of(tensor)
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride() or tensor.is_neg()
    if tensor.numel():
        assert made.data_ptr() != tensor.data_ptr()


def test_tensors_of_one_memory_have_one_in_the_copy_too():
    whole = torch.arange(5000.0)
    made = copy_of({"whole": whole, "part": whole[10:], "array": np.ones(5000)})
    made["whole"][10] = -1
    assert made["part"][0] == -1
    assert whole[10] == 10
    made["array"][0] = 2
    made["whole"].resize_(6000)
    whole.resize_(6000)
