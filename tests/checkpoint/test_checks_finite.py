"""Whether numbers are finite."""

from __future__ import annotations

import math

import pytest
import torch

from hpc_train.checkpoint.catalogue import find_checkpoints
from hpc_train.checkpoint.checks import are_finite
from hpc_train.errors import NotFiniteError
from hpc_train.mpi.group import Group
from tests.checkpoint.states import change, store

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_among_many_is_found(dtype, value):
    tensors = [torch.ones(100, dtype=dtype) for _ in range(3)]
    assert are_finite(tensors)
    tensors[1][7] = value
    assert not are_finite(tensors)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_large_numbers_that_add_up_to_infinity_are_finite(dtype):
    real = torch.float32 if dtype.is_complex else dtype
    assert are_finite([torch.full((1000,), torch.finfo(real).max, dtype=dtype)])
    assert are_finite([torch.ones(2, dtype=torch.int64), torch.zeros(0)])


def test_numbers_of_8_bits_are_looked_at():
    numbers = torch.ones(5)
    assert are_finite([numbers.to(torch.float8_e4m3fn)])
    numbers[3] = math.nan
    assert not are_finite([numbers.to(torch.float8_e4m3fn)])


@pytest.mark.mpi
def test_a_nan_in_a_parameter_stops_the_save_before_anything_is_written(job, together):
    for value in (math.nan, 1.0):
        made = store(together / str(value), job.world)
        change(made, 1)
        made.save(1)
        with torch.no_grad():
            made.state.model.weight[0, 0] = value
        if math.isfinite(value):
            made.save(2)
            continue
        with pytest.raises(NotFiniteError, match="after step 2 trained parameters are infinite"):
            made.save(2)
        assert len(find_checkpoints(together / str(value), "auto")) == 1


def test_infinities_of_a_mask_are_no_reason_to_stop(tmp_path):
    made = store(tmp_path, Group())
    made.state.model.register_buffer("mask", torch.full((3,), -math.inf))
    made.save(1)
    made.state.model.bias.requires_grad_(False).fill_(math.inf)
    made.save(2)
