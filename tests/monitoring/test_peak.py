from __future__ import annotations

import pytest
import torch

from hpc_train.monitoring.peak import peak_flops

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_measurement_leaves_random_numbers_alone_and_finds_a_speed(dtype):
    before = torch.get_rng_state()
    assert 1e8 < peak_flops(CPU, dtype, seconds=0.02) < 1e15
    assert torch.equal(torch.get_rng_state(), before)


def test_a_type_that_has_no_products_is_an_error():
    with pytest.raises(RuntimeError):
        peak_flops(CPU, torch.bool, seconds=0.02)
